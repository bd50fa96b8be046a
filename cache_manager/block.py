"""One block of the pool, and the order in which free blocks are granted."""

from collections.abc import Iterator
from enum import Enum
from typing import NewType

from pagekeeper.common.ids import BlockHash, BlockId
from pagekeeper.common.operations import BlockRef

Content = NewType("Content", bytes)
"""What the first slots of a block hold for good, all of them or those of a released sequence's tail: the hash of what
stands before the block, then the tokens, 4 bytes each. As one string of bytes it takes 129 bytes for 16 tokens, and the
garbage collector does not visit it."""


class BlockState(Enum):
    """Every block but the null block is in exactly one."""

    FREE = "free"
    """In the free queue; still findable (cached) as long as it has a content."""
    LEASED = "leased"
    """Of exactly one session: partly filled, or full and not yet sealed."""
    SEALED = "sealed"
    """Immutable and findable. Full, unless it is a released sequence's tail that a step copies from."""
    QUARANTINED = "quarantined"
    """Was LEASED by a session that ended without proof that its device work has ended."""

    __hash__ = object.__hash__
    """States are counted at every transition, and Enum's own hash is Python code: 10 % of the policy's time."""


class Block:
    """Bookkeeping of one block; its bytes are elsewhere.

    `references` counts the block-table entries that name it. `holds` counts how often it was let go by a message whose
    step has not been reported as ended: such a block is not FREE, but nothing reads it through a table any more, so a
    hold does not stop the last table from writing in place.
    """

    __slots__ = (
        "content",
        "depth",
        "generation",
        "hash",
        "holds",
        "id",
        "newer",
        "next",
        "older",
        "previous",
        "references",
        "state",
    )

    def __init__(self, block_id: BlockId) -> None:
        self.id = block_id
        self.generation = 0
        self.state = BlockState.FREE
        self.references = 0
        self.holds = 0
        self.content: Content | None = None
        """Set exactly while the block can be found by it, and while a LEASED one is let go that will be once it is
        FREE."""
        self.hash: BlockHash | None = None
        """Of the content if that fills the block, else None."""
        self.depth = 0
        """Its index in every block table that names it."""
        self.previous: Block = self
        self.next: Block = self
        """In the free queue."""
        self.older: Block | None = None
        self.newer: Block | None = None
        """Among the findable blocks that begin alike, see `PrefixCache`."""

    def __repr__(self) -> str:
        return f"<block {self.id}.{self.generation} {self.state.value} refs={self.references} holds={self.holds}>"

    @property
    def ref(self) -> BlockRef:
        """How the block travels."""
        return BlockRef(self.id, self.generation)


class _Ring:
    """A doubly linked list through the blocks themselves, so that any block leaves it in O(1)."""

    def __init__(self) -> None:
        self._head = Block(BlockId(0))

    def __iter__(self) -> Iterator[Block]:
        block = self._head.next
        while block is not self._head:
            yield block
            block = block.next

    def append(self, block: Block) -> None:
        last = self._head.previous
        last.next = self._head.previous = block
        block.previous, block.next = last, self._head

    @staticmethod
    def remove(block: Block) -> None:
        block.previous.next = block.next
        block.next.previous = block.previous
        block.previous = block.next = block

    def first(self) -> Block | None:
        return None if self._head.next is self._head else self._head.next


class FreeQueue:
    """Free blocks in the order in which they are granted; every operation is O(1).

    Uncached blocks come first, because granting one loses nothing. Then cached ones, least recently used first. A chain
    is always added deepest block first: so it is also eaten from its end, and what is left of it can still be found.
    """

    def __init__(self) -> None:
        self._uncached = _Ring()
        self._cached = _Ring()
        self.num_uncached = 0
        self.num_cached = 0

    def __len__(self) -> int:
        return self.num_uncached + self.num_cached

    def __iter__(self) -> Iterator[Block]:
        yield from self._uncached
        yield from self._cached

    def append(self, block: Block) -> None:
        """Add a block as the most recently used one of its kind."""
        if block.content is None:
            self._uncached.append(block)
            self.num_uncached += 1
        else:
            self._cached.append(block)
            self.num_cached += 1

    def remove(self, block: Block) -> None:
        """Take out a block that is in the queue, wherever it stands. Its content must be as when it was added."""
        _Ring.remove(block)
        if block.content is None:
            self.num_uncached -= 1
        else:
            self.num_cached -= 1

    def first(self) -> Block | None:
        """The block to grant next."""
        return self._uncached.first() or self._cached.first()

    def first_cached(self) -> Block | None:
        """The cached block to grant next."""
        return self._cached.first()
