"""How many sequences are handed to runners at once, and which request is next."""

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
        num_sequences: how many a runner decodes at once for the request.
        on_grant: must not raise: it may be called while another request leaves.
    """

    priority: int
    arrival: int
    num_sequences: int
    on_grant: Callable[[], None]


class Admission:
    """Permits for requests with `max_concurrent` sequences in all; up to `max_queue` requests more wait.

    They wait by priority (lower first), then arrival; none overtakes because it is smaller. A request with more than
    `max_concurrent` sequences runs alone.
    """

    def __init__(self, max_concurrent: int, max_queue: int) -> None:
        self._max_concurrent = max_concurrent
        self._max_queue = max_queue
        self._arrivals = itertools.count()
        self._running: set[Permit] = set()
        self._num_sequences = 0
        self._waiting: list[Permit] = []

    @property
    def running(self) -> int:
        """Requests that hold a permit."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def permit(self, priority: int, on_grant: Callable[[], None], num_sequences: int = 1) -> Permit:
        """A permit to `enter` with; until then there is nothing to give back, and `leave` does nothing."""
        return Permit(priority, next(self._arrivals), num_sequences, on_grant)

    def enter(self, permit: Permit, instead_of: Permit | None = None) -> None:
        """Ask for a permit to be granted; `on_grant` is called once, now or when there is room.

        Args:
            permit: what `leave` takes back.
            instead_of: another that leaves in favour of this one. Where it holds its permit or waits for it, this one
                takes its place, and nobody else comes between.

        Raises:
            OverloadedError: the queue is full.
        """
        if instead_of is not None and instead_of in self._running:
            self._retire(instead_of)
            # It was there first; what is more than its room is over the limit for a while.
            self._grant(permit)
            return
        if instead_of is not None and instead_of in self._waiting:
            self._waiting.remove(instead_of)
            permit.arrival = instead_of.arrival
        elif (self._waiting or not self._has_room(permit)) and self.waiting >= self._max_queue:
            raise OverloadedError(
                f"{self.running} requests are running and {self.waiting} wait; no more are taken", _RETRY_AFTER_S
            )
        bisect.insort(self._waiting, permit, key=lambda waiting: (waiting.priority, waiting.arrival))
        self._grant_waiting()

    def leave(self, permit: Permit) -> None:
        """Give the permit back, or the place in the queue; once more does nothing."""
        if permit in self._running:
            self._retire(permit)
        elif permit in self._waiting:
            self._waiting.remove(permit)
        self._grant_waiting()

    def _has_room(self, permit: Permit) -> bool:
        return not self._running or self._num_sequences + permit.num_sequences <= self._max_concurrent

    def _grant_waiting(self) -> None:
        while self._waiting and self._has_room(self._waiting[0]):
            self._grant(self._waiting.pop(0))

    def _grant(self, permit: Permit) -> None:
        self._running.add(permit)
        self._num_sequences += permit.num_sequences
        permit.on_grant()

    def _retire(self, permit: Permit) -> None:
        self._running.remove(permit)
        self._num_sequences -= permit.num_sequences
