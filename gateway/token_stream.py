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

    The answer's length bounds what can wait here. A reader that leaves too much of it for too long `is_stalled`.

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

    def push(self, token_ids: Sequence[int], finish_reason: FinishReason | None = None) -> None:
        """Add the next tokens; with a finish reason they are the last."""
        self._token_ids += token_ids
        self._finish_reason = finish_reason
        if self._waiting_since is None:
            self._waiting_since = self._clock()
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """End the stream: `next` raises `error` once the tokens before it are read. The first failure counts."""
        self._error = self._error or error
        self._changed.set()

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
        """Whether more than `max_tokens` wait, the oldest for longer than `max_seconds`."""
        if self._waiting_since is None or len(self._token_ids) <= max_tokens:
            return False
        return self._clock() - self._waiting_since > max_seconds
