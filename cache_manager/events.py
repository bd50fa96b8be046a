"""Changes of what can be found by content, as the policy tells them to whoever listens.

Every change has a number, whether or not anybody listens: so a listener that comes back knows whether it missed any.
"""

from collections.abc import Callable
from dataclasses import dataclass

from pagekeeper.common.ids import BlockHash


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A block was sealed. `parent_hash` is that of the block before it, None for the first one of a sequence."""

    number: int
    block_hash: BlockHash
    parent_hash: BlockHash | None
    tenant: str
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks were granted anew, or flushed."""

    number: int
    block_hashes: list[BlockHash]


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """The pool was carved anew, so nothing is found any more."""

    number: int


CacheEvent = BlockStored | BlocksRemoved | CacheCleared

EventListener = Callable[[CacheEvent], None]
"""Is called in the middle of an operation: it takes note and returns at once."""
