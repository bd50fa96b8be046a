"""One request as runners see it, over all its attempts."""

from dataclasses import dataclass, field

from gateway.finish_reason import FinishReason
from gateway.token_stream import TokenStream
from gateway.validation import Sampling
from pagekeeper.common.errors import BugError


@dataclass(frozen=True)
class ResolvedRequest:
    """What a runner is asked for, with every default filled in; the same in every attempt.

    Attributes:
        seed: the one in use, whoever chose it.
        max_tokens: of the whole answer, capped by the context length.
        stop_token_ids: every token that ends the answer.
    """

    request_id: str
    tenant: str
    prompt_token_ids: list[int]
    sampling: Sampling
    seed: int
    max_tokens: int
    stop_token_ids: frozenset[int]
    priority: int


@dataclass
class Generation:
    """The answer so far, and which attempt may add to it.

    Attributes:
        token_ids: every token of the answer: resumed ones, then generated ones. With the prompt it is all that another
            runner needs to go on.
        number: names the request on the runners' streams.
        attempt: rises with every submission; what an older attempt still sends is void.
        losses_in_a_row: runners lost since the last new token.
        cached_tokens: of the earliest attempt that reported it.
        recomputed_tokens: by attempt.
    """

    request: ResolvedRequest
    token_ids: list[int]
    stream: TokenStream = field(default_factory=TokenStream)
    number: int = 0
    attempt: int = 0
    losses_in_a_row: int = 0
    cached_tokens: int | None = None
    recomputed_tokens: dict[int, int] = field(default_factory=dict)

    def accept(self, position: int, token_ids: list[int], finish_reason: FinishReason | None) -> None:
        """Take tokens of the current attempt, the first at `position` of the answer; those already here are dropped.

        Raises:
            BugError: tokens between the answer so far and `position` are missing.
        """
        known = len(self.token_ids) - position
        if known < 0:
            raise BugError(f"attempt {self.attempt} skips from position {len(self.token_ids)} to {position}")
        new = token_ids[known:]
        if new:
            self.losses_in_a_row = 0
        self.token_ids += new
        if new or finish_reason:
            self.stream.push(new, finish_reason)

    def count(self, cached_tokens: int, recomputed_tokens: int) -> None:
        """Take what the current attempt reports about its use of the cache."""
        if self.cached_tokens is None:
            self.cached_tokens = cached_tokens
        self.recomputed_tokens[self.attempt] = recomputed_tokens
