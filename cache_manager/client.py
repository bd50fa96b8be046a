"""How a model runner talks to the cache manager."""

import mmap
from dataclasses import dataclass
from typing import Protocol

from cache_manager.prefix_cache import Fingerprint
from pagekeeper.common.errors import PagekeeperError
from pagekeeper.common.ids import Epoch
from pagekeeper.common.operations import Operation, Result

__all__ = ["CacheConnectionLost", "Exchange", "Fingerprint", "Granted"]


class CacheConnectionLost(PagekeeperError):
    """The session cannot be used any more.

    Try `reattach()`, which succeeds if only the stream broke; if that raises this error too, the manager is gone and
    with it the pool: connect again and map the new pool. Either way every live sequence is opened again.
    """


@dataclass(frozen=True)
class Granted:
    """What the manager answered to the attachment."""

    epoch: Epoch
    """One for each session, rising over the manager's life."""
    start_id: str
    """Differs after every start of the manager."""
    num_blocks: int
    """Blocks in the pool, the null block included."""
    block_bytes: int
    watermark_blocks: int
    """Blocks that an Open leaves free; a sequence of more than num_blocks - 1 - watermark_blocks never fits."""


class Exchange(Protocol):
    """One session with a cache manager: messages go up in order, their results come down in the same order."""

    @property
    def granted(self) -> Granted:
        """The session; another one after `reattach`."""
        ...

    @property
    def memory(self) -> mmap.mmap:
        """The pool, shared and writable, at least `num_blocks * block_bytes` bytes. Stays mapped while referenced."""
        ...

    def send(self, step: int, completed_step: int, operations: list[Operation]) -> None:
        """Send the next message; never blocks. The arguments are those of `StepMessage`.

        Raises:
            CacheConnectionLost: the session is over.
        """
        ...

    def receive(self, timeout_s: float) -> list[Result]:
        """Wait for the results of the oldest unanswered message, one for each of its operations.

        Raises:
            TimeoutError: no answer yet; the message stays the oldest unanswered one.
            CacheConnectionLost: the session is over, and there will be no answer.
        """
        ...

    def reattach(self, timeout_s: float) -> None:
        """Begin a new session over the same hand-over connection and memory. No step may be in flight.

        Nothing is carried over: sequences must be opened again. The old session keeps its blocks until the first
        message of the new one has been applied.

        Raises:
            CacheConnectionLost: the manager is gone.
        """
        ...

    def close(self) -> None:
        """End the session: its blocks are free at once. No step may be in flight. Idempotent."""
        ...
