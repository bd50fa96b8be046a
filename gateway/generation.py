"""One request as runners see it, over all its attempts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.finish_reason import FinishReason
from gateway.sampling import Sampling
from gateway.token_stream import Beam, Tokens, TokenStream
from pagekeeper.common.errors import BugError
from pagekeeper.v1.types_pb2 import TokenLogprobs


@dataclass(frozen=True)
class ResolvedRequest:
    """What a runner is asked for, with every default filled in; the same in every attempt.

    Attributes:
        prompt_token_ids: a branch's tokens included.
        seed: the one in use, whoever chose it.
        max_tokens: of each candidate's whole answer, capped by the context length.
        stop_token_ids: every token that ends an answer.
        bad_words: the token sequences that must not occur.
        priority: lower is served earlier.
        is_resumed: the client has tokens of the answer, or an end, and with them its first message.
    """

    request_id: str
    tenant: str
    prompt_token_ids: list[int]
    sampling: Sampling
    seed: int
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    bad_words: Sequence[Sequence[int]] = ()
    priority: int = 0
    is_resumed: bool = False

    @property
    def num_sequences(self) -> int:
        """How many sequences a runner decodes at once for it."""
        beam_search = self.sampling.beam_search
        return beam_search.width if beam_search else self.sampling.n


@dataclass(frozen=True)
class CacheUse:
    """What an attempt reports of one candidate.

    Attributes:
        cached_tokens: of the prompt, found in the cache.
        recomputed_tokens: whose KV had been computed before and was computed again.
    """

    cached_tokens: int
    recomputed_tokens: int


class Generation:
    """The answer so far, and which attempt may add to it.

    Args:
        request: what is to be answered.
        resumed: by candidate, the tokens that the client has; there are none of the others.

    Attributes:
        token_ids: every token of each candidate: resumed ones, then generated ones. With the prompt they are all that
            another runner needs to go on.
        stream: where they wait for the client; a candidate that is not open there has ended.
        number: names the request on the runners' streams.
        attempt: rises with every submission to a runner; what an older attempt still sends is void.
        losses_in_a_row: runners lost since the last new token.
        needs_prompt_logprobs: they were asked for and have not come.
        cached_tokens: of the earliest attempt that reported it.
        recomputed_tokens: by attempt and candidate.
    """

    def __init__(self, request: ResolvedRequest, resumed: Mapping[int, Sequence[int]] | None = None) -> None:
        self.request = request
        self.token_ids = {index: [*(resumed or {}).get(index, ())] for index in range(request.sampling.n)}
        self.stream = TokenStream(self.token_ids)
        self.number = 0
        self.attempt = 0
        self.losses_in_a_row = 0
        self.needs_prompt_logprobs = request.sampling.prompt_logprobs is not None and not request.is_resumed
        self.cached_tokens: int | None = None
        self.recomputed_tokens: dict[tuple[int, int], int] = {}

    @property
    def is_at_start(self) -> bool:
        """Whether no token of what is still to be done is there. A search always has all its work in one piece."""
        return self.request.sampling.beam_search is None and not any(
            self.token_ids[index] for index in self.stream.open
        )

    @property
    def shortest_attempt(self) -> int:
        """How long an answer a runner must have room for to be of any use: one token more; a search all of it."""
        if self.request.sampling.beam_search is not None:
            return self.request.max_tokens
        return 1 + max((len(self.token_ids[index]) for index in self.stream.open), default=0)

    def accept(self, position: int, tokens: Tokens) -> None:
        """Take tokens of the current attempt, the first at `position` of their candidate's answer.

        Those already here are dropped, and so is what comes for a candidate that has ended.

        Raises:
            BugError: tokens between the answer so far and `position` are missing, or log-probabilities are.
        """
        known = self.token_ids.get(tokens.candidate)
        if known is None:
            raise BugError(f"attempt {self.attempt} answers for candidate {tokens.candidate}, which there is not")
        if tokens.candidate not in self.stream.open:
            return
        num_known = len(known) - position
        if num_known < 0:
            raise BugError(f"attempt {self.attempt} skips from position {len(known)} to {position}")
        if self.request.sampling.logprobs is not None and len(tokens.logprobs) != len(tokens.token_ids):
            raise BugError(f"attempt {self.attempt} has {len(tokens.logprobs)} logprobs of {len(tokens.token_ids)}")
        self._check_prompt_came_first()
        new = tokens.token_ids[num_known:]
        if new:
            self.losses_in_a_row = 0
        known += new
        if new or tokens.finish_reason:
            logprobs = tokens.logprobs[num_known:]
            self.stream.push(Tokens(tokens.candidate, new, tokens.finish_reason, logprobs, tokens.score))

    def accept_prompt_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Take those of the prompt; nothing if they are here.

        Raises:
            BugError: they are not one for each token but the first.
        """
        if not self.needs_prompt_logprobs:
            return
        expected = len(self.request.prompt_token_ids) - 1
        if len(logprobs) != expected:
            raise BugError(f"attempt {self.attempt} has {len(logprobs)} prompt logprobs, not {expected}")
        self.needs_prompt_logprobs = False
        self.stream.push_prompt_logprobs(logprobs)

    def accept_beams(self, beams: Sequence[Beam]) -> None:
        """Take the running beams of a search that has not ended."""
        self._check_prompt_came_first()
        if not self.stream.has_ended:
            self.stream.push_beams(beams)

    def count(self, candidate: int, use: CacheUse) -> None:
        """Take what the current attempt reports."""
        if self.cached_tokens is None:
            self.cached_tokens = use.cached_tokens
        self.recomputed_tokens[self.attempt, candidate] = use.recomputed_tokens

    def end_resumed(self, candidate: int, finish_reason: FinishReason) -> None:
        """The tokens that the client has of a candidate are its whole answer."""
        self.stream.push(Tokens(candidate, [], finish_reason))

    def _check_prompt_came_first(self) -> None:
        if self.needs_prompt_logprobs:
            raise BugError(f"attempt {self.attempt} answers before it has sent the prompt's logprobs")
