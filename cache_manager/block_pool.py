"""The blocks of one pool: who may write which, what is free, what is found by content.

Mechanism only. Who asks, and whether he may, is decided in `sequences` and `sessions`.
"""

from cache_manager.block import Block, BlockState, Content, FreeQueue
from cache_manager.events import BlocksRemoved, EventListener
from cache_manager.prefix_cache import PrefixCache
from cache_manager.stats import Counters
from pagekeeper.common.errors import BugError
from pagekeeper.common.ids import BlockHash, BlockId


class BlockPool:
    """Blocks 1 to num_blocks - 1. The null block is not here, so it can be in no state and can never be granted.

    A block is let go in two moves, because a step in flight may still touch it: `let_go` turns a table's reference into
    a hold, and `settle` ends the hold once that step is known to have ended. Only then may it become FREE.
    """

    def __init__(self, num_blocks: int, counters: Counters, listener: EventListener | None = None) -> None:
        self.blocks = [Block(BlockId(block_id)) for block_id in range(1, num_blocks)]
        self.free_queue = FreeQueue()
        self.prefix_cache = PrefixCache()
        self.num_in_state = dict.fromkeys(BlockState, 0)
        self.num_in_state[BlockState.FREE] = len(self.blocks)
        self.num_referenced = 0
        """Blocks that at least one block table names."""
        self.listener = listener
        """Who is told of blocks that become findable or are found no more, if anybody."""
        self._counters = counters
        for block in self.blocks:
            self.free_queue.append(block)

    @property
    def num_free(self) -> int:
        """Blocks that can be granted, cached ones included."""
        return len(self.free_queue)

    def grant(self, depth: int) -> Block:
        """Lease the next free block to the entry at index `depth` of one block table. There must be a free one."""
        block = self.free_queue.first()
        if block is None:
            raise BugError("no free block")
        self.free_queue.remove(block)
        if block.content is not None:
            self._counters.evictions += 1
            self._forget([block])
        block.generation += 1
        block.depth = depth
        self._enter(block, BlockState.LEASED)
        self._reference(block)
        return block

    def share(self, block: Block) -> None:
        """Let one more block-table entry name a block that is in use or was found by its hash."""
        self._take_back(block)
        self._reference(block)

    def hold(self, block: Block) -> None:
        """Keep a block that was found by its content from being granted, because a step will copy from it."""
        self._take_back(block)
        block.holds += 1

    def seal(self, block: Block, content: Content, block_hash: BlockHash) -> None:
        """Make a leased, full block immutable and findable. No other block may have this hash."""
        self.prefix_cache.add(block, content, block_hash)
        self._enter(block, BlockState.SEALED)
        self._counters.seals += 1
        self._counters.events += 1

    def flush(self, most: int) -> int:
        """Make at most so many cached blocks unfindable, least recently used first; returns how many."""
        blocks: list[Block] = []
        while len(blocks) < most and (block := self.free_queue.first_cached()):
            self.free_queue.remove(block)
            blocks.append(block)
        if blocks:
            self._forget(blocks)
        for block in blocks:
            self.free_queue.append(block)
        return len(blocks)

    def let_go(self, block: Block) -> None:
        """Turn one table entry's reference into a hold."""
        block.holds += 1
        self._drop_reference(block)

    def settle(self, block: Block) -> None:
        """End one hold; the block becomes FREE if nothing else keeps it, and findable if it has a tail's content."""
        block.holds -= 1
        if block.references or block.holds:
            return
        if block.state is BlockState.LEASED and block.content is not None:
            self.prefix_cache.add_tail(block, block.content)
        self._free(block)

    def abandon(self, references: list[Block], holds: list[Block], *, quarantine: bool) -> list[Block]:
        """End everything a session has, at once: `references` by its tables' entries, and `holds`.

        Blocks that nothing else keeps become FREE, deepest first whichever sequence they were of; with `quarantine`
        those that the session could write become QUARANTINED instead. What was LEASED is not found afterwards: whether
        the steps that were to fill it have run is not known.

        Returns:
            The quarantined blocks, for `release_quarantined`.
        """
        for block in references:
            self._drop_reference(block)
        for block in holds:
            block.holds -= 1
        orphans = dict.fromkeys(block for block in (*references, *holds) if not block.references and not block.holds)
        quarantined = []
        for block in sorted(orphans, key=lambda orphan: orphan.depth, reverse=True):
            if block.state is BlockState.LEASED:
                block.content = None
                if quarantine:
                    self._enter(block, BlockState.QUARANTINED)
                    quarantined.append(block)
                    continue
            self._free(block)
        return quarantined

    def release_quarantined(self, blocks: list[Block]) -> None:
        """The device work that could write these has ended."""
        for block in blocks:
            self._free(block)

    def _forget(self, blocks: list[Block]) -> None:
        """Make cached blocks unfindable. They must have left the free queue."""
        forgotten = [block.hash for block in blocks if block.hash is not None]
        for block in blocks:
            self.prefix_cache.remove(block)
        if forgotten:
            self._counters.events += 1
            if self.listener is not None:
                self.listener(BlocksRemoved(self._counters.events, forgotten))

    def _take_back(self, block: Block) -> None:
        if block.state is BlockState.FREE:
            self.free_queue.remove(block)
            self._enter(block, BlockState.SEALED)

    def _free(self, block: Block) -> None:
        self._enter(block, BlockState.FREE)
        self.free_queue.append(block)

    def _enter(self, block: Block, state: BlockState) -> None:
        self.num_in_state[block.state] -= 1
        self.num_in_state[state] += 1
        block.state = state

    def _reference(self, block: Block) -> None:
        self.num_referenced += not block.references
        block.references += 1

    def _drop_reference(self, block: Block) -> None:
        block.references -= 1
        self.num_referenced -= not block.references
