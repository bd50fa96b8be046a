"""`model_runner.cache_session`, as a coroutine."""

from collections.abc import Callable

from pagekeeper.common.operations import Operation, Result
from tests.simulation.device import Device
from tests.simulation.exchange import ConnectionLost, Exchange
from tests.simulation.network import Network
from tests.simulation.process import Process, Waiting

_HEARTBEAT_S = 0.25
_ANSWER_POLL_S = 0.5
_REATTACH_TIMEOUT_S = 5.0
_RETRY_S = 0.05
_MANAGER_WAIT_S = 60.0


class CacheSession:
    """See there.

    Args:
        network: where the cache manager is.
        process: whose session it is.
        device: works on the pool of whatever session there is.
        poke: wakes the engine.
        is_stopping: whether nobody wants an answer any more.
    """

    def __init__(
        self,
        network: Network,
        process: Process,
        device: Device,
        poke: Callable[[], None],
        is_stopping: Callable[[], bool],
    ) -> None:
        self._network = network
        self._process = process
        self._device = device
        self._poke = poke
        self._is_stopping = is_stopping
        self._held_since: int | None = None
        self._next_heartbeat = 0.0
        self._has_answered = False
        self.current: Exchange | None = None

    @property
    def is_attached(self) -> bool:
        """Whether there is a session that is not lost, and its first message has been answered."""
        return self._has_answered and self.current is not None and not self.current.is_lost

    @property
    def holds_blocks(self) -> bool:
        """Blocks that were let go wait until their step is reported as ended."""
        return self._held_since is not None

    def seconds_to_heartbeat(self) -> float:
        """How long nothing has to be said, if nothing happens."""
        return max(0.0, self._next_heartbeat - self._process.world.now)

    def must_talk(self, completed_step: int) -> bool:
        """Whether a message is due even without an operation."""
        return self._reports_end(completed_step) or self.seconds_to_heartbeat() == 0

    def exchange(self, step: int, completed_step: int, operations: list[Operation]) -> Waiting[list[Result]]:
        """Send the next message and wait for its results, however long that takes."""
        if self.current is None:
            raise ConnectionLost
        self.current.send(step, completed_step, operations)
        while not self.current.has_news:
            yield from self.wait(lambda: self.current is None or self.current.has_news, _ANSWER_POLL_S)
            if not self.current.has_news and self._is_stopping():
                raise ConnectionLost
        results = self.current.receive()
        self._has_answered = True
        self._next_heartbeat = self._process.world.now + _HEARTBEAT_S
        if self._reports_end(completed_step):
            self._held_since = None
        return results

    def hold(self, step: int) -> None:
        """The last message, sent at the launch of `step`, let blocks go."""
        self._held_since = step

    def attach(self) -> Waiting[None]:
        """Begin a session, on the same pool if only the stream broke."""
        if self._is_stopping():
            raise ConnectionLost
        self._has_answered = False
        if self.current is None or not (yield from self.current.reattach(_REATTACH_TIMEOUT_S)):
            self.close()
            self.current = yield from self._connect()
            self._device.bind(self.current.memory)
        self._held_since = None
        self._next_heartbeat = 0.0
        self._process.world.note(self._process.name, "attached, session", self.current.granted.epoch)

    def close(self) -> None:
        """End the session."""
        if self.current is not None:
            self.current.close()

    def wait(self, done: Callable[[], object], longest_s: float) -> Waiting[None]:
        """Wait until something is so, or for so long."""
        if not done():
            deadline = self._process.world.now + longest_s
            self._process.after(longest_s, self._poke)
            yield lambda: done() or self._process.world.now >= deadline

    def _connect(self) -> Waiting[Exchange]:
        """See `model_runner.manager`."""
        deadline = self._process.world.now + _MANAGER_WAIT_S
        while True:
            exchange = Exchange(self._network, self._process, self.wait, self._poke)
            if (yield from exchange.connect()):
                return exchange
            if self._process.world.now > deadline or self._is_stopping():
                raise ConnectionLost
            yield from self.wait(self._is_stopping, _RETRY_S)

    def _reports_end(self, completed_step: int) -> bool:
        return self._held_since is not None and completed_step > self._held_since
