"""What waits between a runner and a client: tokens of consecutive steps join while the client is busy."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.finish_reason import FinishReason


@dataclass(frozen=True)
class Tokens:
    """All tokens that waited, and why they are the last, if they are."""

    token_ids: list[int]
    finish_reason: FinishReason | None


class TokenStream:
    """Written by the runner client, read by one handler; never blocks the writer.

    It ends once, with the last tokens or with a failure, whenever the reader comes to see that. The answer's length
    bounds what can wait here. A reader that leaves it for too long `is_stalled`.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._token_ids: list[int] = []
        self._finish_reason: FinishReason | None = None
        self._error: Exception | None = None
        self._changed = asyncio.Event()
        self._waiting_since: float | None = None
        self._on_end: Callable[[], None] | None = None

    @property
    def has_ended(self) -> bool:
        """Whether nothing more can come."""
        return self._finish_reason is not None or self._error is not None

    def when_ended(self, on_end: Callable[[], None]) -> None:
        """Have `on_end` called when the stream ends, read or not. To be set once, before it has ended."""
        self._on_end = on_end

    def push(self, token_ids: Sequence[int], finish_reason: FinishReason | None = None) -> None:
        """Add the next tokens; with a finish reason they are the last."""
        self._token_ids += token_ids
        self._finish_reason = finish_reason
        self._wake_reader()

    def fail(self, error: Exception) -> None:
        """End the stream: `next` raises `error` once the tokens before it are read; nothing if it has ended already."""
        if not self.has_ended:
            self._error = error
            self._wake_reader()

    def _wake_reader(self) -> None:
        if self._waiting_since is None:
            self._waiting_since = self._clock()
        self._changed.set()
        if self.has_ended and self._on_end is not None:
            self._on_end()

    async def next(self) -> Tokens:
        """Everything that waits, or the next tokens to come. Not to be called again after the last tokens.

        Raises:
            Exception: the stream has failed.
        """
        await self._changed.wait()
        if self._error and not self._token_ids:
            raise self._error
        tokens = Tokens(self._token_ids, self._finish_reason)
        self._token_ids = []
        self._waiting_since = None
        if not self._error:
            self._changed.clear()
        return tokens

    def is_stalled(self, max_tokens: int, max_seconds: float) -> bool:
        """Whether what waits has been left unread for longer than `max_seconds`.

        Up to `max_tokens` are no stall as long as more can come: they are few, and their request is at work anyway.
        """
        if self._waiting_since is None or (len(self._token_ids) <= max_tokens and not self.has_ended):
            return False
        return self._clock() - self._waiting_since > max_seconds
