"""From response messages to values, and the state of an answer that grows: all that needs no I/O."""

import contextlib
import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from grpc_health.v1 import health_pb2

from pagekeeper.client.attempts import Attempts
from pagekeeper.client.requests import FINISH_REASONS, UNKNOWN_FINISH_REASON, branch_request, resuming_request
from pagekeeper.client.values import (
    Beam,
    Candidate,
    Delta,
    GivenPrompt,
    ModelInfo,
    Resume,
    Sampling,
    TokenLogprobs,
    Usage,
)
from pagekeeper.common.errors import BugError, PagekeeperError
from pagekeeper.v1 import generate_pb2, types_pb2

_NAMES: dict[int, str] = {value: name for name, value in FINISH_REASONS.items()}

CLOSED = "the client was closed while a call was running on it"


class _Call(Protocol):
    def cancel(self) -> bool | None: ...


class BaseAnswer:
    """The state of one request's answer; how its messages are read is up to `Answer` and `AsyncAnswer`.

    A stream that breaks is followed by another that resumes it, and nothing here shows it: deltas, candidates and usage
    are those of the whole answer.

    Closing an answer ends the request: `close()`, leaving a `with` block over it or a loop over it, dropping it. An
    answer that was closed early ends where it is, without a finish reason and usage.

    Attributes:
        request_id: the request's own, else one that the client has made.
        seed: the seed in use; None until the first delta.
        candidates: by index, as far as they have come.
        prompt: what the model was given; None unless `echo` or `prompt_logprobs` asked for it.
        branch_text: of a branch, the text of the tokens behind which it begins. The text of the candidates continues
            it, also in the middle of a word or a character.
        beams: of a beam search with `intermediate`, the running beams as they were last, highest score first.
        usage: token counts; None until the last delta has come.
    """

    def __init__(self, request: generate_pb2.GenerateRequest, attempts: Attempts) -> None:
        self._request = request
        self._attempts = attempts
        self._cancellable: _Call | None = None
        self._is_closed = False
        self._failure: PagekeeperError | None = None
        self._pending: deque[Delta] = deque()
        self._resumed = {candidate.index: list(candidate.token_ids) for candidate in request.resume.candidates}
        self.request_id = request.request_id
        self.seed: int | None = request.resume.seed if request.HasField("resume") else None
        self.candidates = {
            candidate.index: Candidate(candidate.index, finish_reason=_finish_reason(candidate.finish_reason))
            for candidate in request.resume.candidates
            if candidate.finish_reason
        }
        self.prompt: GivenPrompt | None = None
        self.branch_text = ""
        self.beams: list[Beam] = []
        self.usage: Usage | None = None

    @property
    def received(self) -> Resume | None:
        """What `generate` needs as `resume` to go on after this answer, what it resumed included; None: nothing yet.

        Candidates that have ended are said to have, and no more comes of them; not after the whole answer, since all
        that is left then is to go on beyond its end, with more `max_tokens` for example.
        """
        if self.seed is None:
            return None
        if self._request.sampling.HasField("beam_search"):
            return Resume(self.seed, [])  # it starts again
        count = max([*self._resumed, *self.candidates], default=-1) + 1
        return Resume(
            self.seed,
            [self._token_ids(index) for index in range(count)],
            [self._finish_reason(index) for index in range(count)] if self.usage is None else [],
        )

    def close(self) -> None:
        """End the request, if it runs, and every loop over the answer."""
        self._is_closed = True
        if self._cancellable is not None:
            self._cancellable.cancel()

    def __del__(self) -> None:
        self.close()

    def _token_ids(self, index: int) -> list[int]:
        new = self.candidates[index].token_ids if index in self.candidates else []
        return [*self._resumed.get(index, []), *new]

    def _finish_reason(self, index: int) -> str | None:
        return self.candidates[index].finish_reason if index in self.candidates else None

    @contextlib.contextmanager
    def _final_failures(self) -> Iterator[None]:
        """An answer that has failed has failed: whoever reads on gets the same error."""
        if self._failure is not None:
            raise self._failure
        try:
            yield
        except PagekeeperError as failure:
            self._failure = failure
            if self._cancellable is not None:
                self._cancellable.cancel()
            raise

    def _next_request(self) -> generate_pb2.GenerateRequest:
        """What the next attempt asks for: all, or what has not come yet."""
        if not self._attempts.has_begun and not self._attempts.may_be_live:
            return self._request
        return resuming_request(self._request, self.received or Resume(0, []))

    def _take(self, response: generate_pb2.GenerateResponse) -> None:
        """Take in one message; its deltas wait in `_pending`."""
        self._attempts.make_progress()
        if response.HasField("seed"):
            self.seed = response.seed
        if response.HasField("usage"):
            self.usage = _usage(response.usage)
        if response.HasField("prompt") and self.prompt is None:
            self.prompt = _prompt(response.prompt)
        if response.HasField("branch_text"):
            self.branch_text = response.branch_text
        if response.beams:
            self.beams = [Beam(list(beam.token_ids), beam.text, beam.score) for beam in response.beams]
        for message in response.deltas:
            self._take_delta(_delta(message))

    def _take_delta(self, delta: Delta) -> None:
        candidate = self.candidates.setdefault(delta.index, Candidate(delta.index))
        if candidate.finish_reason is not None:
            # An older server to which the request was sent again does not know that this candidate had ended.
            return
        position = len(self._resumed.get(delta.index, ())) + len(candidate.token_ids)
        if delta.token_ids and delta.position != position:
            text = f"candidate {delta.index} is at position {position}, but the server went on at {delta.position}"
            raise BugError(text)
        candidate.text += delta.text
        candidate.token_ids += delta.token_ids
        candidate.finish_reason = delta.finish_reason
        candidate.logprobs += delta.logprobs
        if delta.cumulative_logprob is not None:
            # The server's is the sum over the last stream.
            whole = sum(token.logprob for token in candidate.logprobs)
            delta = dataclasses.replace(delta, cumulative_logprob=whole)
        candidate.cumulative_logprob, candidate.score = delta.cumulative_logprob, delta.score
        self._pending.append(delta)

    def _branch(
        self, position: int, candidate: int, request_id: str, sampling: Sampling
    ) -> generate_pb2.GenerateRequest:
        return branch_request(
            self._request,
            self._token_ids(candidate),
            position,
            request_id=request_id,
            earlier_request_id=self.request_id,
            sampling=sampling,
        )

    def _in_order(self) -> list[Candidate]:
        return [candidate for _, candidate in sorted(self.candidates.items())]

    def _tokens_received(self) -> int:
        return sum(map(len, self._resumed.values())) + sum(len(c.token_ids) for c in self.candidates.values())


def first_text(candidates: list[Candidate]) -> str:
    """The text of the first candidate."""
    return candidates[0].text if candidates else ""


def models(infos: Iterable[generate_pb2.ModelInfo]) -> list[ModelInfo]:
    """What ListModels answers."""
    return [ModelInfo(info.name, info.vocab_size, info.max_context_length) for info in infos]


def is_serving(response: health_pb2.HealthCheckResponse) -> bool:
    """What the health service answers."""
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


def _delta(message: generate_pb2.CandidateDelta) -> Delta:
    return Delta(
        index=message.index,
        position=message.position,
        token_ids=list(message.token_ids),
        text=message.text,
        finish_reason=_finish_reason(message.finish_reason),
        logprobs=_logprobs(message.logprobs),
        cumulative_logprob=message.cumulative_logprob if message.HasField("cumulative_logprob") else None,
        score=message.score if message.HasField("score") else None,
    )


def _finish_reason(value: int) -> str | None:
    return _NAMES.get(value, UNKNOWN_FINISH_REASON) if value else None


def _logprobs(messages: Sequence[types_pb2.TokenLogprobs]) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(
            message.token_id,
            message.logprob,
            message.rank,
            dict(zip(message.top_token_ids, message.top_logprobs, strict=True)),
        )
        for message in messages
    ]


def _prompt(message: generate_pb2.Prompt) -> GivenPrompt:
    # The first token has nothing before it, and is missing from the message.
    logprobs = [None, *_logprobs(message.logprobs)] if message.logprobs else []
    return GivenPrompt(list(message.token_ids), message.text, logprobs)


def _usage(message: types_pb2.Usage) -> Usage:
    return Usage(
        prompt_tokens=message.prompt_tokens,
        cached_tokens=message.cached_tokens,
        resumed_tokens=message.resumed_tokens,
        recomputed_tokens=message.recomputed_tokens,
        completion_tokens=message.completion_tokens,
    )
