"""The invariants of the pool, checked from the outside: every count is taken anew from what it counts."""

from collections import Counter
from collections.abc import Iterable

from cache_manager.block import Block, BlockState
from cache_manager.block_pool import BlockPool
from cache_manager.sequences import Sequences


def check_counts(pool: BlockPool) -> list[str]:
    """Check what the pool says of all its blocks together.

    Returns:
        One sentence for each broken invariant.
    """
    broken = []
    if [block.id for block in pool.blocks] != list(range(1, len(pool.blocks) + 1)):
        broken.append("the blocks are not 1, 2, 3, ...; the null block must not be among them")
    counted = Counter(block.state for block in pool.blocks)
    broken += [
        f"{pool.num_in_state[state]} blocks are counted as {state.value}, but {counted[state]} are"
        for state in BlockState
        if pool.num_in_state[state] != counted[state]
    ]
    referenced = sum(block.references > 0 for block in pool.blocks)
    if pool.num_referenced != referenced:
        broken.append(f"{pool.num_referenced} blocks are counted as referenced, but {referenced} are")
    return broken


def check_free_queue(pool: BlockPool) -> list[str]:
    """Check that the free blocks, and no others, are in the queue, and its order between uncached and cached.

    Returns:
        One sentence for each broken invariant.
    """
    queue, num_free = list(pool.free_queue), pool.num_in_state[BlockState.FREE]
    cached = [block.content is not None for block in queue]
    broken = [f"{block!r} is in the free queue" for block in queue if block.state is not BlockState.FREE]
    if len(set(queue)) != len(queue) or len(queue) != num_free:
        broken.append(f"{len(queue)} entries are in the free queue, but {num_free} blocks are free")
    if cached != sorted(cached):
        broken.append("a cached block stands before an uncached one in the free queue")
    if (pool.free_queue.num_uncached, pool.free_queue.num_cached) != (cached.count(False), cached.count(True)):
        broken.append("the free queue's numbers of uncached and cached blocks are wrong")
    num_findable = pool.num_in_state[BlockState.SEALED] + cached.count(True)
    if len(pool.prefix_cache) != num_findable:
        broken.append(f"{len(pool.prefix_cache)} blocks are indexed, but {num_findable} are sealed or cached")
    return broken


def check_sessions(pool: BlockPool, sessions: Iterable[Sequences], quarantined: list[Block]) -> list[str]:
    """Check the lengths of block tables and the lists of quarantined blocks.

    Returns:
        One sentence for each broken invariant.
    """
    broken = []
    num_quarantined = pool.num_in_state[BlockState.QUARANTINED]
    if len(set(quarantined)) != len(quarantined) or len(quarantined) != num_quarantined:
        broken.append(f"sessions list {len(quarantined)} blocks as quarantined, but {num_quarantined} are")
    for session in sessions:
        for name, sequence in session.by_id.items():
            if len(sequence.blocks) != -(-sequence.length // session.block_size):
                broken.append(f"sequence {name} has {sequence.length} tokens in {len(sequence.blocks)} blocks")
    return broken


def check_blocks(pool: BlockPool, first: int, last: int, sessions: Iterable[Sequences]) -> list[str]:
    """Check `pool.blocks[first:last]` against every block-table entry and every hold that names one of them.

    Returns:
        One sentence for each broken invariant.
    """
    broken = []
    blocks = pool.blocks[first:last]
    inside = set(blocks)
    references: Counter[Block] = Counter()
    holds: Counter[Block] = Counter()
    owners: dict[Block, set[int]] = {block: set() for block in blocks}
    for owner, session in enumerate(sessions):
        for name, sequence in session.by_id.items():
            for index, block in enumerate(sequence.blocks):
                if block not in inside:
                    continue
                references[block] += 1
                owners[block].add(owner)
                if index != block.depth:
                    broken.append(f"{block!r} of depth {block.depth} is entry {index} of sequence {name}")
                if index < sequence.num_sealed and block.state is not BlockState.SEALED:
                    broken.append(f"{block!r} is counted as sealed by sequence {name}")
        for _, block in session.holds:
            if block in inside:
                holds[block] += 1
                owners[block].add(owner)
    for block in blocks:
        if block.references != references[block] or block.holds != holds[block]:
            broken.append(f"{block!r} is named by {references[block]} table entries and {holds[block]} holds")
        if (block.state in (BlockState.LEASED, BlockState.SEALED)) != bool(references[block] or holds[block]):
            broken.append(f"{block!r} is in a state that its references do not allow")
        if block.state is BlockState.LEASED and len(owners[block]) > 1:
            broken.append(f"{block!r} is leased by {len(owners[block])} sessions")
        broken += _check_content(pool, block)
    return broken


def _check_content(pool: BlockPool, block: Block) -> list[str]:
    """Check by what a block can be found, and that it is found by that."""
    broken = []
    if block.hash is not None and pool.prefix_cache.find(block.hash) is not block:
        broken.append(f"{block!r} has a hash by which another block or none is found")
    findable = block.content is not None and block.state is not BlockState.LEASED
    if findable != pool.prefix_cache.is_linked(block):
        broken.append(f"{block!r} {'is not' if findable else 'is'} found by its first tokens")
    may_be_found = {BlockState.SEALED: (True,), BlockState.FREE: (True, False)}.get(block.state, (False,))
    if findable not in may_be_found or (block.hash is not None and not findable):
        broken.append(f"{block!r} {'is' if findable else 'is not'} findable by content")
    if block.content is not None and block.hash is None and block.references:
        broken.append(f"{block!r} is named by a table, but has the content of a tail that was released")
    return broken
