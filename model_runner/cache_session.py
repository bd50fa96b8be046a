"""The engine's session with the cache manager: what must be said besides operations, and how it begins anew."""

import time
from collections.abc import Callable

import structlog

from cache_manager.client import CacheConnectionLost, Exchange
from model_runner.device import Device
from pagekeeper.common.errors import BugError
from pagekeeper.common.failpoints import failpoint
from pagekeeper.common.operations import Operation, Release, Result, Seal

_HEARTBEAT_S = 0.25
"""Longest silence of an engine that is between two steps: nothing else tells it that the cache manager hangs."""
_ANSWER_POLL_S = 0.5
_REATTACH_TIMEOUT_S = 5.0

log = structlog.get_logger()


class CacheSession:
    """For the engine's thread alone, but for `is_attached`.

    Args:
        connect: waits for a cache manager and begins a session with it.
        device: works on the pool of whatever session there is.
        is_stopping: whether nobody wants an answer any more.
    """

    def __init__(self, connect: Callable[[], Exchange], device: Device, is_stopping: Callable[[], bool]) -> None:
        self._connect = connect
        self._device = device
        self._is_stopping = is_stopping
        self._exchange: Exchange | None = None
        self._has_answered = False
        self._held_since: int | None = None
        self._next_heartbeat = 0.0

    @property
    def is_attached(self) -> bool:
        """Whether there is a session that is not lost, and its first message has been answered; any thread may ask."""
        exchange = self._exchange
        return self._has_answered and exchange is not None and not exchange.is_lost

    @property
    def holds_blocks(self) -> bool:
        """Blocks that were let go wait until their step is reported as ended."""
        return self._held_since is not None

    def seconds_to_heartbeat(self) -> float:
        """How long nothing has to be said, if nothing happens."""
        return max(0.0, self._next_heartbeat - time.monotonic())

    def must_talk(self, completed_step: int) -> bool:
        """Whether a message is due even without an operation."""
        return self._reports_end(completed_step) or self.seconds_to_heartbeat() == 0

    def exchange(self, step: int, completed_step: int, operations: list[Operation]) -> list[Result]:
        """Send the next message and wait for its results, however long that takes.

        Raises:
            CacheConnectionLost: the session is over, or nobody wants the answer any more.
        """
        if self._exchange is None:
            raise BugError("the engine is not attached")
        if any(isinstance(operation, Seal) for operation in operations):
            failpoint("runner.before_seal")
        self._exchange.send(step, completed_step, operations)
        if any(isinstance(operation, Release) for operation in operations):
            failpoint("runner.mid_release")
        results = self._receive(self._exchange)
        self._has_answered = True
        self._next_heartbeat = time.monotonic() + _HEARTBEAT_S
        if self._reports_end(completed_step):
            self._held_since = None
        return results

    def hold(self, step: int) -> None:
        """The last message, sent at the launch of `step`, let blocks go."""
        self._held_since = step

    def attach(self) -> None:
        """Begin a session, on the same pool if only the stream broke.

        Raises:
            CacheConnectionLost: no manager came, or nobody waits for one any more.
            ConfigurationError: the manager refuses this runner.
        """
        if self._is_stopping():
            raise CacheConnectionLost("the runner is stopping")
        self._has_answered = False
        if self._exchange is None or not _reattached(self._exchange):
            # The old pool is unmapped before a new one is asked for: both may not fit into memory.
            self._let_go()
            self._exchange = self._connect()
            self._device.bind(self._exchange.memory, self._exchange.granted.num_blocks)
        self._held_since = None
        # The session that this one supersedes ends with its first message.
        self._next_heartbeat = 0.0
        log.info("attached to the cache manager", epoch=self._exchange.granted.epoch)

    def close(self) -> None:
        """End the session. The device must have let go of the pool."""
        if self._exchange is not None:
            self._exchange.close()

    def _reports_end(self, completed_step: int) -> bool:
        return self._held_since is not None and completed_step > self._held_since

    def _let_go(self) -> None:
        self._device.unbind()
        self.close()
        self._exchange = None

    def _receive(self, exchange: Exchange) -> list[Result]:
        while True:
            try:
                return exchange.receive(_ANSWER_POLL_S)
            except TimeoutError:
                if self._is_stopping():
                    raise CacheConnectionLost("the runner is stopping") from None


def _reattached(exchange: Exchange) -> bool:
    try:
        exchange.reattach(_REATTACH_TIMEOUT_S)
    except (CacheConnectionLost, TimeoutError) as error:
        log.warning("not attached yet", reason=str(error))
        return False
    return True
