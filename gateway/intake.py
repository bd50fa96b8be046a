"""How a request becomes a live one, waits for its permit, and goes to a runner with it."""

import functools
from typing import Protocol

from gateway.admission import Admission
from gateway.generation import Generation
from gateway.live_requests import LiveRequest, LiveRequests
from pagekeeper.common.errors import DuplicateRequestError
from pagekeeper.common.failpoints import failpoint


class Runners(Protocol):
    """Who does the work."""

    def submit(self, generation: Generation) -> None:
        """Have the generation's stream filled until its last token, `cancel`, or failure. Raises nothing itself."""

    def cancel(self, generation: Generation) -> None:
        """Stop a generation, wherever it is; nothing happens if it has ended."""


class Intake:
    """Lets requests in.

    Args:
        live: where they are registered.
        admission: gives permits.
        runners: where they go.
    """

    def __init__(self, live: LiveRequests, admission: Admission, runners: Runners) -> None:
        self._live = live
        self._admission = admission
        self._runners = runners

    def enter(self, request: LiveRequest, *, takes_over: bool) -> None:
        """Register a request and queue for a permit, unless its answer is complete already.

        Whether it may is decided first: only then is an older stream that it takes over ended.

        Raises:
            DuplicateRequestError: its id has a live stream, and it does not take over.
            OverloadedError: the queue is full.
        """
        resolved = request.generation.request
        older = self._live.find(resolved.tenant, resolved.request_id)
        if older is not None and not takes_over:
            raise DuplicateRequestError(f"request id {resolved.request_id!r} has a live stream")
        if not request.generation.stream.has_ended:
            self._admit(request, older)
        self._live.enter(request)

    def _admit(self, request: LiveRequest, older: LiveRequest | None) -> None:
        """Queue for a permit, or take the older stream's; with it the generation goes to a runner."""
        generation = request.generation

        def start() -> None:
            if older is not None:
                # First, so that what it lets go is found in the cache.
                self._runners.cancel(older.generation)
            failpoint("gateway.before_submit")
            self._runners.submit(generation)

        resolved = generation.request
        permit = request.permit = self._admission.permit(resolved.priority, start, resolved.num_sequences)
        request.release.callback(self._admission.leave, permit)
        request.release.callback(self._runners.cancel, generation)
        # A client that is slow to read the end of its answer keeps no one from a runner.
        generation.stream.when_ended(functools.partial(self._admission.leave, permit))
        self._admission.enter(permit, instead_of=older.permit if older else None)
