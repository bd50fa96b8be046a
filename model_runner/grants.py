"""What a sequence asks the cache manager for, and how it takes in what it was granted."""

from model_runner.block_table import BlockTable
from model_runner.sequence import Sequence
from pagekeeper.common.operations import BlockCopy, Extended, Fork, Open, Opened, Release, Seal


def opening(sequence: Sequence, max_new_tokens: int) -> Open:
    """Open it with all that is known, or with what it has in common with its followers."""
    known = len(sequence.token_ids) if sequence.fork is None else sequence.fork.num_tokens
    sequence.open_sent = True
    return Open(
        sequence.id,
        sequence.tenant,
        sequence.token_ids[:known],
        max_cached_tokens=min(known, sequence.most_cached_tokens),
        max_new_tokens=max_new_tokens,
        reopen=sequence.was_computed > 0,
    )


def take_opened(sequence: Sequence, opened: Opened, block_size: int) -> list[BlockCopy]:
    """Begin to run with what was granted; returns the copies to make first."""
    sequence.block_table = BlockTable(opened.blocks)
    sequence.num_computed = opened.num_cached_tokens
    sequence.num_sealed_blocks = opened.num_cached_tokens // block_size
    if sequence.num_cached_tokens is None:
        sequence.num_cached_tokens = min(opened.num_cached_tokens, sequence.num_prompt_tokens)
    return _take_slots(sequence, opened.copies, block_size)


def take_extended(sequence: Sequence, extended: Extended, block_size: int) -> list[BlockCopy]:
    """Take in further slots; returns the copies to make first."""
    sequence.block_table.resize(extended.kept_blocks, extended.blocks)
    return _take_slots(sequence, extended.copies, block_size)


def _take_slots(sequence: Sequence, copies: list[BlockCopy], block_size: int) -> list[BlockCopy]:
    for copy in copies:
        sequence.block_table.rename(copy.index, [copy.destination])
    num_slots = len(sequence.block_table) * block_size
    sequence.num_slots = num_slots if sequence.fork is None else min(num_slots, sequence.fork.num_tokens)
    return copies


def fork(parent: Sequence, num_tokens: int, children: list[Sequence]) -> Fork:
    """Let `children` begin where `parent` is; which of them may write into the shared tail is to be asked for."""
    parent.num_slots = num_tokens
    for child in children:
        child.open_sent = True
        child.num_slots = num_tokens
        child.num_computed, child.num_in_flight = parent.num_computed, parent.num_in_flight
        child.num_sealed_blocks = parent.num_sealed_blocks
        child.was_computed = max(child.was_computed, parent.num_computed)
        if child.num_cached_tokens is None:
            child.num_cached_tokens = parent.num_cached_tokens
    return Fork(parent.id, num_tokens, [child.id for child in children])


def take_forked(parent: Sequence, children: list[Sequence]) -> None:
    """Give the children their parent's table, as it is now."""
    for child in children:
        child.block_table = BlockTable(parent.block_table.blocks)


def seal(sequence: Sequence, block_size: int) -> Seal:
    """Seal the blocks that have become full."""
    first, full = sequence.num_sealed_blocks, sequence.num_computed // block_size
    sequence.num_sealed_blocks = full
    token_ids = sequence.token_ids[first * block_size : full * block_size]
    return Seal(sequence.id, token_ids, sequence.block_table.blocks[first:full])


def release(sequence: Sequence, block_size: int) -> Release:
    """Give everything back; what lies after the sealed blocks is named so that it stays findable."""
    tail = sequence.token_ids[sequence.num_sealed_blocks * block_size : sequence.num_computed]
    give_up(sequence)
    return Release(sequence.id, tail)


def give_up(sequence: Sequence) -> Release:
    """Give everything back, and let the unsealed tail be forgotten."""
    sequence.block_table = BlockTable()
    sequence.num_computed = sequence.num_in_flight = sequence.num_slots = sequence.num_sealed_blocks = 0
    sequence.open_sent = False
    return Release(sequence.id)
