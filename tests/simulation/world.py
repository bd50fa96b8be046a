"""The simulated world: one clock, one queue of events, one source of chance, and a record of what happened.

Nothing else decides anything, so a seed is a whole history: the same seed gives the same events in the same order.
"""

import heapq
import itertools
import random
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

_KEPT_EVENTS = 400


class Violation(AssertionError):
    """An invariant is broken."""


class Trace:
    """What happened: a checksum over everything, and the last events for whoever has to find out why."""

    def __init__(self, echo: Callable[[str], None] | None = None) -> None:
        self.checksum = 0
        self._events: deque[tuple[float, str, tuple[Any, ...]]] = deque(maxlen=_KEPT_EVENTS)
        self._echo = echo

    def note(self, now: float, who: str, *what: Any) -> None:
        """Add an event. Its words are the same in every run of the seed: no ids of objects, no order of a set."""
        self.checksum = zlib.crc32(repr((now, who, what)).encode(), self.checksum)
        self._events.append((now, who, what))
        if self._echo is not None:
            self._echo(_line(now, who, what))

    def lines(self) -> Iterator[str]:
        """The last events, oldest first."""
        for event in self._events:
            yield _line(*event)


def _line(now: float, who: str, what: tuple[Any, ...]) -> str:
    return f"{now:10.4f}  {who:<12} {' '.join(map(str, what))}"


class World:
    """Runs events in the order of their times; of equal times in the order in which they were planned.

    Args:
        seed: of everything.
        echo: is given each event of the trace as a line.
    """

    def __init__(self, seed: int, echo: Callable[[str], None] | None = None) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.trace = Trace(echo)
        self._numbers = itertools.count()
        self._queue: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []

    def at(self, time: float, call: Callable[..., object], *arguments: Any) -> None:
        """Have `call` called then."""
        heapq.heappush(self._queue, (time, next(self._numbers), call, arguments))

    def after(self, delay: float, call: Callable[..., object], *arguments: Any) -> None:
        """Have `call` called `delay` seconds from now."""
        heapq.heappush(self._queue, (self.now + delay, next(self._numbers), call, arguments))

    def note(self, who: str, *what: Any) -> None:
        """Write an event into the trace."""
        self.trace.note(self.now, who, *what)

    def run(self, until: float, done: Callable[[], bool]) -> bool:
        """Let events happen until `done()` or the time is over; returns whether it was `done`."""
        queue = self._queue
        while not done():
            if not queue or queue[0][0] > until:
                self.now = until
                return False
            self.now, _, call, arguments = heapq.heappop(queue)
            call(*arguments)
        return True
