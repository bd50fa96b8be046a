"""Whether a call that has failed is made again, where and when: policy alone, which waits for nothing itself."""

import random
import time
from collections.abc import Callable

import grpc

from pagekeeper.common.errors import OverloadedError, PagekeeperError, UnavailableError
from pagekeeper.status import Failure, failure_of, to_error

RESUME_FOR_S = 60.0
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
# The longest pause is reached long before; beyond, the power would only grow.
_MOST_DOUBLINGS = 10
# Another address may do better.
_OF_THE_ADDRESS = frozenset({Failure.REFUSED, Failure.LOST, Failure.UNAVAILABLE, Failure.DRAINING})


class Route:
    """A server as all calls of one client see it: its addresses, and which of them they take.

    Several gateways of the same runners are one server: each can go on with what another has begun.

    Args:
        server: the addresses, with commas between them.
        on_retry: called with what has failed before each further attempt.
        clock: seconds, monotonic.
        rng: from 0 to 1, evenly.

    Attributes:
        current: the address that calls take now: the first, until it fails.
        was_reached: whether any address has ever answered.
    """

    def __init__(
        self,
        server: str,
        on_retry: Callable[[PagekeeperError], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: Callable[[], float] = random.random,
    ) -> None:
        parts = [part.strip() for part in server.split(",")]
        self.server = server
        self.on_retry = on_retry
        self.clock = clock
        self.rng = rng
        self.addresses = tuple(dict.fromkeys(part for part in parts if part)) or (server,)
        self.current = self.addresses[0]
        self.was_reached = False

    def leave(self, address: str) -> None:
        """Take the next address from now on; nothing if the calls have left this one already."""
        if address == self.current:
            self.current = self.addresses[(self.addresses.index(address) + 1) % len(self.addresses)]


class Attempts:
    """The attempts of one call, until it has succeeded or another makes no sense.

    What one address cannot do is tried at the next, at once. When all have failed there is a pause before they are
    tried again, at random up to a limit that doubles each time ("full jitter"), so that the clients of a gateway that
    comes back do not come all together.

    Args:
        route: where the call may go.
        timeout_s: for the whole call, with all attempts and pauses; None: no limit.
        resume_for_s: how long it is made again when the connection is lost, until its answer goes on; 0: not at all.

    Attributes:
        has_begun: part of the answer has come.
        may_be_live: a server that was lost may still be at work on the call.
    """

    def __init__(self, route: Route, timeout_s: float | None, resume_for_s: float) -> None:
        self._route = route
        self._timeout_s = timeout_s
        self._resume_for_s = resume_for_s
        self._began = route.clock()
        self._address = route.current
        self._num_failures = 0
        self._quiet_since = self._began
        self._lost_at: float | None = None
        self._num_lost = 0
        self.has_begun = False
        self.may_be_live = False

    def next(self) -> tuple[str, float | None]:
        """Address and timeout in seconds of the next attempt."""
        self._address = self._route.current
        return self._address, self._left_s()

    def make_progress(self) -> None:
        """A part of the answer has come."""
        self.has_begun = self._route.was_reached = True
        self._num_failures = 0
        self._lost_at = None
        self._quiet_since = self._route.clock()

    def pause_s(self, error: grpc.RpcError, tokens_received: int = 0) -> float:
        """How long to wait before the next attempt.

        Args:
            error: how the last one failed.
            tokens_received: how much of the answer the client has.

        Raises:
            PagekeeperError: there is to be none.
        """
        failure = failure_of(error)
        reason = to_error(error, self._route.server, has_begun=self.has_begun, tokens_received=tokens_received)
        if failure is Failure.DUPLICATE and self._num_lost:
            # It was us, as far as can be known.
            reason = UnavailableError(str(reason), tokens_received)
        pause_s = self._pause_s(failure, reason)
        if pause_s is None:
            raise reason from error
        if self._route.on_retry is not None:
            self._route.on_retry(reason)
        left_s = self._left_s()
        return pause_s if left_s is None else min(pause_s, left_s)

    def _pause_s(self, failure: Failure, reason: PagekeeperError) -> float | None:
        self._num_failures += 1
        goes_elsewhere = False
        if failure in _OF_THE_ADDRESS:
            self._route.leave(self._address)
            goes_elsewhere = self._num_failures % len(self._route.addresses) > 0
        if failure is Failure.REFUSED and goes_elsewhere:
            # Nobody has seen the call: elsewhere it is a first attempt.
            return 0.0
        if not self._is_curable(failure):
            return None
        self._route.was_reached = True
        if failure is Failure.LOST:
            self.may_be_live = True
            self._num_lost += 1
        elif failure is Failure.DUPLICATE:
            self._num_lost -= 1

        patience_s = self._patience_s(failure)
        if isinstance(reason, OverloadedError):
            return reason.retry_after_s if reason.retry_after_s < patience_s else None
        if patience_s <= 0:
            return None
        return 0.0 if goes_elsewhere else min(self._backoff_s(), patience_s)

    def _is_curable(self, failure: Failure) -> bool:
        """Whether another attempt can have another outcome."""
        match failure:
            case Failure.REFUSED:
                return self._route.was_reached
            case Failure.LOST | Failure.UNAVAILABLE | Failure.DRAINING | Failure.SLOW_READER:
                return True
            case Failure.DUPLICATE:
                # A call of ours that was lost can reach its server late, and takes the place of the one after it, once.
                # More often than that it was somebody else, with whom we do not fight over the request.
                return self._num_lost > 0
            case Failure.OVERLOADED:
                return self.has_begun
            case Failure.FINAL:
                return False

    def _patience_s(self, failure: Failure) -> float:
        """How much longer to go on trying."""
        now = self._route.clock()
        if self._lost_at is None:
            # A server that says so has waited for a runner itself; without this, its wait and ours would add up. One
            # that drains has ended what went well.
            self._lost_at = self._quiet_since if failure is Failure.UNAVAILABLE else now
        return self._lost_at + self._resume_for_s - now

    def _backoff_s(self) -> float:
        rounds = max(1, self._num_failures // len(self._route.addresses))
        limit_s = _FIRST_PAUSE_S * 2.0 ** min(rounds - 1, _MOST_DOUBLINGS)
        return self._route.rng() * min(limit_s, _LONGEST_PAUSE_S)

    def _left_s(self) -> float | None:
        if self._timeout_s is None:
            return None
        return max(0.0, self._began + self._timeout_s - self._route.clock())
