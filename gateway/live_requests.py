"""Requests that are being answered now, by tenant and request id."""

import asyncio
from contextlib import ExitStack

from gateway.generation import Generation
from pagekeeper.common.errors import DuplicateRequestError, PagekeeperError, SlowReaderError, UnavailableError


class LiveRequest:
    """One request with all that it holds.

    Attributes:
        release: gives everything back; closing it again does nothing. Both the handler and the end of the call close
            it, since a handler that is waiting at a `yield` is not told when its client leaves.
    """

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.release = ExitStack()

    def end(self, error: PagekeeperError) -> None:
        """Give everything back now; the client gets the tokens that wait for it, and then `error`."""
        self.generation.stream.fail(error)
        self.release.close()


class LiveRequests:
    """At most one live request for each tenant and request id.

    Attributes:
        emptied: set while there is none.
    """

    def __init__(self) -> None:
        self.emptied = asyncio.Event()
        self.emptied.set()
        self._live: dict[tuple[str, str], LiveRequest] = {}

    def __len__(self) -> int:
        return len(self._live)

    def enter(self, live: LiveRequest, *, takes_over: bool) -> None:
        """Register a request until its release is closed.

        Args:
            live: the request.
            takes_over: end an older one with the same id, as a client does that resumes.

        Raises:
            DuplicateRequestError: there is an older one.
        """
        work = live.generation.work
        key = (work.tenant, work.request_id)
        older = self._live.get(key)
        if older is not None:
            if not takes_over:
                raise DuplicateRequestError(f"request id {work.request_id!r} has a live stream")
            older.end(DuplicateRequestError(f"a newer stream has taken over request {work.request_id!r}"))
        self._live[key] = live
        self.emptied.clear()
        live.release.callback(self._leave, key)

    def end_slow_readers(self, max_tokens: int, max_seconds: float) -> None:
        """End those with more than `max_tokens` unread, the oldest for longer than `max_seconds`."""
        for live in list(self._live.values()):
            if live.generation.stream.is_stalled(max_tokens, max_seconds):
                live.end(SlowReaderError("the stream is not being read; resume it with the tokens received"))

    def end_all(self, reason: str) -> None:
        """End every request."""
        for live in list(self._live.values()):
            live.end(UnavailableError(reason))

    def _leave(self, key: tuple[str, str]) -> None:
        del self._live[key]
        if not self._live:
            self.emptied.set()
