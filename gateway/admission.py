"""How many requests are handed to runners at once, and which one is next."""

import bisect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from pagekeeper.common.errors import OverloadedError

_RETRY_AFTER_S = 1.0


@dataclass(order=True)
class Ticket:
    """A request's place: it waits until `on_grant` is called, and then has a permit until it leaves."""

    priority: int
    arrival: int
    on_grant: Callable[[], None] = field(compare=False)


class Admission:
    """Permits for `max_concurrent` requests; up to `max_queue` more wait, by priority (lower first), then arrival."""

    def __init__(self, max_concurrent: int, max_queue: int) -> None:
        self._max_concurrent = max_concurrent
        self._max_queue = max_queue
        self._arrivals = itertools.count()
        self._running: set[int] = set()
        self._waiting: list[Ticket] = []

    @property
    def running(self) -> int:
        """Requests that hold a permit."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def enter(self, priority: int, on_grant: Callable[[], None]) -> Ticket:
        """Ask for a permit; `on_grant` is called once, now or when one becomes free.

        Raises:
            OverloadedError: the queue is full.
        """
        has_permit_left = self.running < self._max_concurrent
        if not has_permit_left and self.waiting >= self._max_queue:
            raise OverloadedError(
                f"{self.running} requests are running and {self.waiting} wait; no more are taken", _RETRY_AFTER_S
            )
        ticket = Ticket(priority, next(self._arrivals), on_grant)
        if has_permit_left:
            self._grant(ticket)
        else:
            bisect.insort(self._waiting, ticket)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Give the permit back, or the place in the queue; once more does nothing."""
        if ticket.arrival in self._running:
            self._running.remove(ticket.arrival)
            if self._waiting:
                self._grant(self._waiting.pop(0))
        elif ticket in self._waiting:
            self._waiting.remove(ticket)

    def _grant(self, ticket: Ticket) -> None:
        self._running.add(ticket.arrival)
        ticket.on_grant()
