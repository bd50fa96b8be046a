"""The runner's end of a session with the cache manager, as `cache_manager.client` has it."""

from collections import deque
from collections.abc import Callable
from typing import Any

from pagekeeper.common.operations import Operation, Result, StepMessage
from tests.simulation.device import Memory
from tests.simulation.manager import GOODBYE, MANAGER, Granted, Hello, Welcome
from tests.simulation.network import End, Network
from tests.simulation.process import Process, Waiting

_CONNECT_ATTEMPT_S = 5.0


class ConnectionLost(Exception):
    """As `CacheConnectionLost`."""


class Exchange:
    """One hand-over connection, and the newest session over it.

    Args:
        network: where the cache manager is.
        process: whose exchange it is.
        wait: waits for something, or for so many seconds.
        poke: is called when something has come.
    """

    def __init__(
        self,
        network: Network,
        process: Process,
        wait: Callable[[Callable[[], object], float], Waiting[None]],
        poke: Callable[[], None],
    ) -> None:
        self._network = network
        self._process = process
        self._wait = wait
        self._poke = poke
        self._handover: End | None = None
        self._stream: End | None = None
        self._answers: deque[list[Result]] = deque()
        self._welcome: Welcome | None = None
        self._granted: Granted | None = None
        self._number = 0

    @property
    def granted(self) -> Granted:
        """The session."""
        if self._granted is None:
            raise ConnectionLost
        return self._granted

    @property
    def memory(self) -> Memory:
        """The pool."""
        if self._welcome is None:
            raise ConnectionLost
        return self._welcome.memory

    @property
    def welcome(self) -> Welcome:
        """Whose pool it is."""
        if self._welcome is None:
            raise ConnectionLost
        return self._welcome

    def connect(self) -> Waiting[bool]:
        """Connect to a manager and attach; whether that worked. Then it can be used, otherwise it is done with."""
        self._network.connect(self._process, MANAGER, "handover", self._set_up_handover)
        yield from self._wait(lambda: self._welcome or _has_ended(self._handover), _CONNECT_ATTEMPT_S)
        if self._welcome is not None and (yield from self._attach(_CONNECT_ATTEMPT_S)):
            return True
        self.close()
        return False

    def reattach(self, timeout_s: float) -> Waiting[bool]:
        """Begin a new session over the same connection; whether that worked."""
        if self._stream is not None:
            self._stream.close()
        return (yield from self._attach(timeout_s))

    def send(self, step: int, completed_step: int, operations: list[Operation]) -> None:
        """Send the next message."""
        if self._stream is None or self.is_lost:
            raise ConnectionLost
        self._number += 1
        self._stream.send(StepMessage(self._number, step, completed_step, operations))

    @property
    def is_lost(self) -> bool:
        """Whether the session is known to be over."""
        return self._stream is None or not self._stream.is_open

    @property
    def has_news(self) -> bool:
        """There is an answer, or there will be none."""
        return bool(self._answers) or _has_ended(self._stream)

    def receive(self) -> list[Result]:
        """The oldest answer."""
        if not self._answers:
            raise ConnectionLost
        return self._answers.popleft()

    def close(self) -> None:
        """End the session in good order."""
        if self._stream is not None:
            self._stream.close()
        if self._handover is not None:
            self._handover.send(GOODBYE)
            self._handover.close()

    def _attach(self, timeout_s: float) -> Waiting[bool]:
        self._granted = None
        self._answers.clear()
        self._number = 0
        self._stream = None
        if self._welcome is None or _has_ended(self._handover):
            return False
        self._network.connect(self._process, MANAGER, "attach", self._set_up_stream)
        yield from self._wait(lambda: self._granted or _has_ended(self._stream), timeout_s)
        if self._granted is not None and not _has_ended(self._stream):
            return True
        if self._stream is not None:
            self._stream.close()
        return False

    def _set_up_handover(self, end: End) -> None:
        self._handover = end
        end.on_message = self._welcomed
        end.on_end = self._manager_gone

    def _set_up_stream(self, end: End) -> None:
        self._stream = end
        end.on_message = self._answered
        end.on_end = self._poke
        if self._welcome is not None:
            end.send(Hello(self._welcome.token, self._process.name))

    def _welcomed(self, welcome: Welcome) -> None:
        self._welcome = welcome
        self._poke()

    def _manager_gone(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._poke()

    def _answered(self, answer: Any) -> None:
        if isinstance(answer, Granted):
            self._granted = answer
        else:
            self._answers.append(answer)
        self._poke()


def _has_ended(end: End | None) -> bool:
    return end is not None and not end.is_open
