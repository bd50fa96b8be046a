"""How many requests are handed to runners at once, and which one is next."""

import bisect
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from pagekeeper.common.errors import OverloadedError

_RETRY_AFTER_S = 1.0


@dataclass(eq=False)
class Permit:
    """A request's permit to be with a runner; it waits for it until `on_grant` is called.

    Attributes:
        priority: lower goes first.
        arrival: given by `Admission.permit`; the earlier of equal priority goes first.
        on_grant: must not raise: it may be called while another request leaves.
    """

    priority: int
    arrival: int
    on_grant: Callable[[], None]


class Admission:
    """Permits for `max_concurrent` requests; up to `max_queue` more wait, by priority (lower first), then arrival."""

    def __init__(self, max_concurrent: int, max_queue: int) -> None:
        self._max_concurrent = max_concurrent
        self._max_queue = max_queue
        self._arrivals = itertools.count()
        self._running: set[Permit] = set()
        self._waiting: list[Permit] = []

    @property
    def running(self) -> int:
        """Requests that hold a permit."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def permit(self, priority: int, on_grant: Callable[[], None]) -> Permit:
        """A permit to `enter` with; until then there is nothing to give back, and `leave` does nothing."""
        return Permit(priority, next(self._arrivals), on_grant)

    def enter(self, permit: Permit, instead_of: Permit | None = None) -> None:
        """Ask for a permit to be granted; `on_grant` is called once, now or when there is room.

        Args:
            permit: what `leave` takes back.
            instead_of: another that leaves in favour of this one. Where it holds its permit or waits for it, this one
                takes its place, and nobody else comes between.

        Raises:
            OverloadedError: the queue is full.
        """
        if instead_of in self._running:
            self._running.remove(instead_of)
        elif instead_of is not None and instead_of in self._waiting:
            self._waiting.remove(instead_of)
            permit.arrival = instead_of.arrival
        elif self.running >= self._max_concurrent and self.waiting >= self._max_queue:
            raise OverloadedError(
                f"{self.running} requests are running and {self.waiting} wait; no more are taken", _RETRY_AFTER_S
            )
        if self.running < self._max_concurrent:
            self._grant(permit)
        else:
            bisect.insort(self._waiting, permit, key=lambda waiting: (waiting.priority, waiting.arrival))

    def leave(self, permit: Permit) -> None:
        """Give the permit back, or the place in the queue; once more does nothing."""
        if permit in self._running:
            self._running.remove(permit)
            if self._waiting:
                self._grant(self._waiting.pop(0))
        elif permit in self._waiting:
            self._waiting.remove(permit)

    def _grant(self, permit: Permit) -> None:
        self._running.add(permit)
        permit.on_grant()
