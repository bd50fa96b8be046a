"""What waits between a runner and a client: tokens of consecutive steps join while the client is busy."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gateway.finish_reason import FinishReason
from pagekeeper.v1.generate_pb2 import CandidateDelta
from pagekeeper.v1.types_pb2 import TokenLogprobs


@dataclass
class Tokens:
    """What one candidate gained, and why that is the last, if it is.

    Attributes:
        logprobs: one for each token, if they were asked for; parts of a runner's message, to be copied and not kept.
        score: of a finished hypothesis of a beam search.
    """

    candidate: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: Sequence[TokenLogprobs] = ()
    score: float | None = None


@dataclass(frozen=True)
class Beam:
    """A running beam of a search."""

    token_ids: list[int]
    score: float


@dataclass(frozen=True)
class News:
    """Everything that waited for the client.

    Attributes:
        tokens: one entry for each candidate that gained something.
        prompt_logprobs: one for each token of the prompt but the first; None: not these.
        beams: those of the newest step; None: no new ones.
    """

    tokens: list[Tokens]
    prompt_logprobs: Sequence[TokenLogprobs] | None = None
    beams: Sequence[Beam] | None = None


class TokenStream:
    """Written by the runner client, read by one handler; never blocks the writer.

    It ends once, with the last tokens of the last candidate or with a failure, whenever the reader comes to see that.
    The answer's length bounds what can wait here. A reader that leaves it for too long `is_stalled`.

    Args:
        candidates: their indices.
        clock: seconds, monotonic.

    Attributes:
        open: the candidates to which tokens may still come.
    """

    def __init__(self, candidates: Iterable[int] = (0,), clock: Callable[[], float] = time.monotonic) -> None:
        self.open = set(candidates)
        self._clock = clock
        self._waiting: dict[int, Tokens] = {}
        # Copies in one message each: a part of a runner's message would keep that whole step in memory (measured: 39 KB
        # a token with 64 sequences and 20 alternatives, against 0.4 KB).
        self._logprobs: dict[int, CandidateDelta] = {}
        self._prompt_logprobs: Sequence[TokenLogprobs] | None = None
        self._beams: Sequence[Beam] | None = None
        self._error: Exception | None = None
        self._changed = asyncio.Event()
        self._waiting_since: float | None = None
        self._on_end: Callable[[], None] | None = None

    @property
    def has_ended(self) -> bool:
        """Whether nothing more can come."""
        return not self.open or self._error is not None

    def when_ended(self, on_end: Callable[[], None]) -> None:
        """Have `on_end` called when the stream ends, read or not. To be set once, before it has ended."""
        self._on_end = on_end

    def push(self, tokens: Tokens) -> None:
        """Add an open candidate's next tokens, which are ours from then on; with a finish reason they are its last."""
        waiting = self._waiting.setdefault(tokens.candidate, tokens)
        if waiting is not tokens:
            waiting.token_ids += tokens.token_ids
            waiting.finish_reason, waiting.score = tokens.finish_reason, tokens.score
        if tokens.logprobs:
            holder = self._logprobs.setdefault(tokens.candidate, CandidateDelta())
            holder.logprobs.extend(tokens.logprobs)
            waiting.logprobs = holder.logprobs
        if tokens.finish_reason:
            self.open.remove(tokens.candidate)
        self._wake_reader()

    def push_prompt_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Add those of the prompt; they come once, with the first tokens.

        So whoever has no token of an answer has nothing of it, and gets all of it when the request resumes.
        """
        self._prompt_logprobs = logprobs

    def push_beams(self, beams: Sequence[Beam]) -> None:
        """Replace the beams that wait."""
        self._beams = beams
        self._wake_reader()

    def close(self, candidate: int) -> None:
        """The reader wants no more of a candidate; what waits of it is dropped."""
        self.open.discard(candidate)
        self._waiting.pop(candidate, None)
        self._logprobs.pop(candidate, None)
        self._tell_end()

    def fail(self, error: Exception) -> None:
        """End the stream: `next` raises `error` once what came before it is read; nothing if it has ended already."""
        if not self.has_ended:
            self._error = error
            self._wake_reader()

    def _wake_reader(self) -> None:
        if self._waiting_since is None:
            self._waiting_since = self._clock()
        self._changed.set()
        self._tell_end()

    def _tell_end(self) -> None:
        if self.has_ended and self._on_end is not None:
            self._on_end()

    async def next(self) -> News:
        """Everything that waits, or the next to come. Not to be called again after the last tokens.

        Raises:
            Exception: the stream has failed.
        """
        await self._changed.wait()
        return self.take()

    def take(self) -> News:
        """Everything that waits, which may be nothing; needs no event loop.

        Raises:
            Exception: the stream has failed.
        """
        news = News(list(self._waiting.values()), self._prompt_logprobs, self._beams)
        if self._error and not news.tokens:
            raise self._error
        self._waiting, self._logprobs = {}, {}
        self._prompt_logprobs = self._beams = None
        self._waiting_since = None
        if not self._error:
            self._changed.clear()
        return news

    def is_stalled(self, max_tokens: int, max_seconds: float) -> bool:
        """Whether what waits has been left unread for longer than `max_seconds`.

        Up to `max_tokens` are no stall as long as more can come: they are few, and their request is at work anyway.
        """
        num_waiting = sum(len(tokens.token_ids) for tokens in self._waiting.values())
        if self._waiting_since is None or (num_waiting <= max_tokens and not self.has_ended):
            return False
        return self._clock() - self._waiting_since > max_seconds
