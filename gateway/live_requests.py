"""Requests that are being answered now, by tenant and request id."""

import asyncio
from contextlib import ExitStack

from gateway.admission import Permit
from gateway.generation import Generation
from pagekeeper.common.errors import DrainingError, DuplicateRequestError, PagekeeperError, SlowReaderError


class LiveRequest:
    """One request with all that it holds.

    Attributes:
        permit: None: its answer is made without a runner.
        release: gives everything back; closing it again does nothing. Both the handler and the end of the call close
            it, since a handler that is waiting at a `yield` is not told when its client leaves.
    """

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.permit: Permit | None = None
        self.release = ExitStack()

    def end(self, error: PagekeeperError) -> None:
        """Give everything back now; the client gets what waits for it, and `error` if that is not the whole answer."""
        self.release.close()
        self.generation.stream.fail(error)


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

    def find(self, tenant: str, request_id: str) -> LiveRequest | None:
        """The live request with this id."""
        return self._live.get((tenant, request_id))

    def enter(self, live: LiveRequest) -> None:
        """Register a request until its release is closed; one with the same id is ended."""
        key = (live.generation.request.tenant, live.generation.request.request_id)
        older = self._live.get(key)
        self._live[key] = live
        self.emptied.clear()
        live.release.callback(self._leave, key, live)
        if older is not None:
            older.end(DuplicateRequestError(f"a newer stream has taken over request {key[1]!r}"))

    def end_slow_readers(self, max_tokens: int, max_seconds: float) -> None:
        """End those whose tokens wait for longer than `max_seconds` (`TokenStream.is_stalled`)."""
        for live in list(self._live.values()):
            if live.generation.stream.is_stalled(max_tokens, max_seconds):
                live.end(SlowReaderError("the stream is not being read; resume it with the tokens received"))

    def end_all(self) -> None:
        """End every request, since the server ends."""
        for live in list(self._live.values()):
            live.end(DrainingError())

    def _leave(self, key: tuple[str, str], live: LiveRequest) -> None:
        if self._live.get(key) is live:
            del self._live[key]
        if not self._live:
            self.emptied.set()
