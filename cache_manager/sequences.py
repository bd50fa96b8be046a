"""The sequences of one session, and what each operation does to their block tables."""

from collections import deque
from dataclasses import dataclass, field

from cache_manager.block import Block, BlockState, Content
from cache_manager.block_pool import BlockPool
from cache_manager.events import BlockStored
from cache_manager.prefix_cache import PartialHit, chain, content_of, tenant_root
from cache_manager.stats import Counters
from pagekeeper.common.errors import BugError
from pagekeeper.common.ids import BlockHash, SequenceId
from pagekeeper.common.operations import (
    BlockCopy,
    Extend,
    Extended,
    Fork,
    Forked,
    Open,
    Opened,
    Refused,
    Release,
    Released,
    Seal,
    Sealed,
    Shortage,
)

_MAX_TOKEN_ID = 2**32 - 1


@dataclass(slots=True)
class Sequence:
    """`blocks` is its block table: as many entries as `length` tokens need, the first `num_sealed` of them SEALED.

    `length` is what the runner last named. It may have written more since: an Extend comes only when the next token
    needs a block or a copy, so every slot of the table is its to fill. An entry at or after `num_sealed` may be SEALED
    as well: a fork sealed it first, or the sequence was cut back inside it.
    """

    tenant: str
    length: int
    blocks: list[Block]
    num_sealed: int


@dataclass
class Sequences:
    """Everything one session has. Operations are all or nothing and return `Refused` for what no correct runner sends.

    Attributes:
        by_id: the open sequences.
        refused_opens: sequences whose Open was answered with Shortage and not given up since.
        holds: blocks let go, oldest first, each with the step that must end before they may be granted anew.
    """

    pool: BlockPool
    root: BlockHash
    block_size: int
    watermark_blocks: int
    counters: Counters
    by_id: dict[SequenceId, Sequence] = field(default_factory=dict)
    refused_opens: set[SequenceId] = field(default_factory=set)
    holds: deque[tuple[int, Block]] = field(default_factory=deque)
    step: int = 0

    def begin(self, step: int, completed_step: int) -> None:
        """Start on a message: what it lets go is held until step + 1 has ended; earlier holds may end now."""
        self.step = step
        while self.holds and self.holds[0][0] <= completed_step:
            self.pool.settle(self.holds.popleft()[1])

    def refusal_of(self, operation: Open) -> Refused | None:
        """Why this sequence can never be opened, if so."""
        if operation.sequence in self.by_id:
            return Refused(f"sequence {operation.sequence} is open already")
        if not operation.token_ids:
            return Refused("an Open needs at least one token")
        if not _are_token_ids(operation.token_ids):
            return _not_token_ids()
        most = len(self.pool.blocks) - self.watermark_blocks
        needed = self._blocks_for(len(operation.token_ids))
        if needed > most:
            return Refused(f"{len(operation.token_ids)} tokens need {needed} blocks; no sequence can have over {most}")
        return None

    def open(self, operation: Open) -> Opened | Shortage:
        """Begin a sequence that `refusal_of` has no objection to.

        Whole blocks of its prefix are shared. Where they end, the block that agrees with it for the longest is copied.
        """
        tokens, size = operation.token_ids, self.block_size
        chained = chain(tenant_root(self.root, operation.tenant), operation.tenant, tokens, size)
        hits = self.pool.prefix_cache.longest_prefix(chained, operation.max_cached_tokens // size)
        in_use = sum(block.state is not BlockState.FREE for block in hits)
        needed = self.most_needed(operation) - in_use
        if needed > self.pool.num_free:
            return self.shortage(needed)

        partial = self._partial_hit(operation, hits, spare=self.pool.num_free > needed)
        for block in hits:
            self.pool.share(block)
        num_shared, num_cached = len(hits), len(hits) * size
        if partial is not None:
            self._hold(partial.block)
            num_cached += partial.num_tokens
        sequence = Sequence(operation.tenant, num_cached, hits, num_shared)
        self.by_id[operation.sequence] = sequence
        self._grow(sequence, min(num_cached + operation.max_new_tokens, len(tokens)))
        if operation.reopen:
            self.counters.reopens += 1
        else:
            self.counters.lookups += 1
        self.counters.queried_tokens += len(tokens)
        self.counters.hit_tokens += num_cached
        refs = [block.ref for block in sequence.blocks]
        if partial is None:
            return Opened(num_cached, refs)
        return Opened(
            num_cached, refs, [BlockCopy(num_shared, partial.block.ref, refs[num_shared], partial.num_tokens)]
        )

    def most_needed(self, operation: Open) -> int:
        """Blocks that must be free for an Open that finds nothing in use: its whole length and the watermark."""
        return self._blocks_for(len(operation.token_ids)) + self.watermark_blocks

    def extend(self, operation: Extend) -> Extended | Shortage | Refused:
        """Grant slots up to a total length, or give slots back down to it."""
        sequence = self.by_id.get(operation.sequence)
        if sequence is None:
            return _unknown(operation.sequence)
        if operation.num_tokens < 1:
            return Refused("a sequence has at least one token")
        if operation.num_tokens <= sequence.length:
            self._cut_back(sequence, operation.num_tokens)
            return Extended(len(sequence.blocks), [])

        kept = len(sequence.blocks)
        copy_tail = self._tail_needs_copy(sequence)
        needed = self._blocks_for(operation.num_tokens) - kept + copy_tail
        if needed > self.pool.num_free:
            return self.shortage(needed)
        copies = [self._copy_tail(sequence)] if copy_tail else []
        self._grow(sequence, operation.num_tokens)
        return Extended(kept, [block.ref for block in sequence.blocks[kept:]], copies)

    def seal(self, operation: Seal) -> Sealed | Refused:
        """Make the next full blocks immutable and findable, or rename their entries to blocks that hold the same."""
        sequence = self.by_id.get(operation.sequence)
        if sequence is None:
            return _unknown(operation.sequence)
        size, first, count = self.block_size, sequence.num_sealed, len(operation.blocks)
        if len(operation.token_ids) != count * size:
            return Refused(f"{count} blocks hold {count * size} tokens, not {len(operation.token_ids)}")
        if first + count > len(sequence.blocks):
            return Refused(f"sequence {operation.sequence} has no {count} full blocks after its {first} sealed ones")
        blocks = sequence.blocks[first : first + count]
        for block, named in zip(blocks, operation.blocks, strict=True):
            if block.ref != named:
                return Refused(f"block {named.id}.{named.generation} is stale: the entry names {block!r}")
        if not _are_token_ids(operation.token_ids):
            return _not_token_ids()
        parent = self._hash_before(sequence.tenant, sequence.blocks, first)
        chained = list(chain(parent, sequence.tenant, operation.token_ids, size))
        for block, (block_hash, _) in zip(blocks, chained, strict=True):
            if block.hash is not None and block.hash != block_hash:
                return Refused(f"{block!r} was sealed with other tokens")

        listener = self.pool.listener
        for index, (block_hash, content) in enumerate(chained, first):
            is_new = self._seal_entry(sequence, index, content, block_hash)
            if is_new and listener is not None:
                parent_hash = sequence.blocks[index - 1].hash if index else None
                token_ids = operation.token_ids[(index - first) * size : (index - first + 1) * size]
                listener(BlockStored(self.counters.events, block_hash, parent_hash, sequence.tenant, token_ids))
        sequence.num_sealed += count
        sequence.length = max(sequence.length, sequence.num_sealed * size)
        return Sealed([block.ref for block in sequence.blocks[first : first + count]])

    def fork(self, operation: Fork) -> Forked | Refused:
        """Let children begin with the parent's blocks. A partly filled tail is shared until one of them writes."""
        parent = self.by_id.get(operation.parent)
        if parent is None:
            return _unknown(operation.parent)
        if not 1 <= operation.num_tokens <= len(parent.blocks) * self.block_size:
            return Refused(f"sequence {operation.parent} has no slots for {operation.num_tokens} tokens")
        known = [child for child in operation.children if child in self.by_id or child in self.refused_opens]
        if known or len(set(operation.children)) != len(operation.children):
            return Refused(f"the children of a fork are new sequences, unlike {known or operation.children}")
        self._cut_back(parent, operation.num_tokens)
        for child in operation.children:
            for block in parent.blocks:
                self.pool.share(block)
            self.by_id[child] = Sequence(parent.tenant, parent.length, parent.blocks.copy(), parent.num_sealed)
        self.counters.forks += len(operation.children)
        return Forked()

    def release(self, operation: Release) -> Released | Refused:
        """End a sequence, or give up a refused Open.

        Sealed blocks stay findable until they are granted anew, and so does its tail from the moment when it is FREE.
        """
        if operation.sequence in self.refused_opens:
            self.refused_opens.remove(operation.sequence)
            return Released()
        sequence = self.by_id.get(operation.sequence)
        if sequence is None:
            return _unknown(operation.sequence)
        tail = len(operation.tail_token_ids)
        if tail and (tail >= self.block_size or sequence.num_sealed >= len(sequence.blocks)):
            return Refused(f"sequence {operation.sequence} has no {tail} tokens after its last full block")
        if not _are_token_ids(operation.tail_token_ids):
            return _not_token_ids()
        if tail:
            self._keep_tail(sequence, operation.tail_token_ids)
        self._truncate(sequence, 0)
        del self.by_id[operation.sequence]
        return Released()

    def end(self, *, quarantine: bool) -> list[Block]:
        """End the session; returns the blocks that are quarantined (see `BlockPool.abandon`)."""
        references = [block for sequence in self.by_id.values() for block in sequence.blocks]
        holds = [block for _, block in self.holds]
        self.by_id.clear()
        self.holds.clear()
        return self.pool.abandon(references, holds, quarantine=quarantine)

    def shortage(self, needed_blocks: int) -> Shortage:
        """The answer to an operation that needs more blocks than it may take."""
        self.counters.shortages += 1
        return Shortage(needed_blocks, self.pool.num_free, self._num_releasing())

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _num_releasing(self) -> int:
        own: dict[Block, int] = {}
        for _, block in self.holds:
            own[block] = own.get(block, 0) + 1
        return sum(not block.references and block.holds == count for block, count in own.items())

    def _hash_before(self, tenant: str, blocks: list[Block], index: int) -> BlockHash:
        """What a block at `index` of a table follows, if all before it are sealed."""
        parent = blocks[index - 1].hash if index else tenant_root(self.root, tenant)
        if parent is None:
            raise BugError(f"{blocks[index - 1]!r} is counted as sealed")
        return parent

    def _partial_hit(self, operation: Open, hits: list[Block], *, spare: bool) -> PartialHit | None:
        """What to copy into the block after the hits. A FREE source is then held, so only if there is one to spare."""
        first = len(hits) * self.block_size
        last = min(first + self.block_size, operation.max_cached_tokens)
        parent = self._hash_before(operation.tenant, hits, len(hits))
        found = self.pool.prefix_cache.partial_hit(content_of(parent, operation.token_ids[first:last]))
        return found if found is None or spare or found.block.state is not BlockState.FREE else None

    def _keep_tail(self, sequence: Sequence, token_ids: list[int]) -> None:
        """Let the block after the sealed ones be found by its tokens once it is FREE.

        Not while another table names it: that one may write it, and its own release says what it holds then.
        """
        block = sequence.blocks[sequence.num_sealed]
        if block.state is BlockState.LEASED and block.references == 1:
            block.content = content_of(
                self._hash_before(sequence.tenant, sequence.blocks, sequence.num_sealed), token_ids
            )

    def _grow(self, sequence: Sequence, length: int) -> None:
        for index in range(len(sequence.blocks), self._blocks_for(length)):
            sequence.blocks.append(self.pool.grant(index))
        sequence.length = length

    def _tail_needs_copy(self, sequence: Sequence) -> bool:
        """Whether the next token of the sequence goes into a block that it may not write."""
        if not sequence.length % self.block_size:
            return False
        tail = sequence.blocks[-1]
        return tail.state is BlockState.SEALED or tail.references > 1

    def _copy_tail(self, sequence: Sequence) -> BlockCopy:
        index, source = len(sequence.blocks) - 1, sequence.blocks[-1]
        destination = sequence.blocks[index] = self.pool.grant(index)
        self._let_go(source)
        self.counters.copy_on_write += 1
        return BlockCopy(index, source.ref, destination.ref, sequence.length % self.block_size)

    def _seal_entry(self, sequence: Sequence, index: int, content: Content, block_hash: BlockHash) -> bool:
        """Seal or fold one entry. Returns whether the content was found nowhere before."""
        block = sequence.blocks[index]
        if block.state is BlockState.SEALED:
            return False
        older = self.pool.prefix_cache.find(block_hash)
        if older is None:
            self.pool.seal(block, content, block_hash)
            return True
        self.pool.share(older)
        sequence.blocks[index] = older
        self._let_go(block)
        self.counters.folds += 1
        return False

    def _cut_back(self, sequence: Sequence, length: int) -> None:
        self._truncate(sequence, self._blocks_for(length))
        sequence.num_sealed = min(sequence.num_sealed, length // self.block_size)
        sequence.length = length

    def _truncate(self, sequence: Sequence, num_blocks: int) -> None:
        while len(sequence.blocks) > num_blocks:
            self._let_go(sequence.blocks.pop())

    def _hold(self, block: Block) -> None:
        self.pool.hold(block)
        self.holds.append((self.step + 1, block))

    def _let_go(self, block: Block) -> None:
        self.pool.let_go(block)
        self.holds.append((self.step + 1, block))


def _are_token_ids(token_ids: list[int]) -> bool:
    return not token_ids or (min(token_ids) >= 0 and max(token_ids) <= _MAX_TOKEN_ID)


def _not_token_ids() -> Refused:
    return Refused("token ids are 32-bit unsigned numbers")


def _unknown(sequence: SequenceId) -> Refused:
    return Refused(f"sequence {sequence} is not open")
