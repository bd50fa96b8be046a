"""What goes into a client and comes out of it: plain values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, TypedDict


@dataclass(frozen=True)
class Message:
    """One turn of a chat; `role` is what the model's template knows: "system", "user", "assistant"."""

    role: str
    content: str


Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]
"""Text as it is, token ids, or the messages of a chat."""


@dataclass(frozen=True)
class BeamSearch:
    """A search for the likeliest answers, in place of sampling.

    Attributes:
        width: beams that are kept.
        length_penalty: scores are divided by the answer's length to the power of it; the greater, the longer.
        early_stopping: when a search with `width` finished answers ends: False, when the best running beam would score
            less than all of them; True, at once; "never", when none can ever score more than the least of them.
        intermediate: show the beams as they are after each step (`Answer.intermediate`).
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    intermediate: bool = False


class Sampling(TypedDict, total=False):
    """How tokens are chosen and when to stop; what is absent or None is left to the server.

    docs/api.md has the meaning and the range of each, types.proto too.
    """

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    typical_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str] | None
    seed: int | None
    min_tokens: int | None
    max_tokens: int | None
    stop: Sequence[str] | None
    include_stop_str: bool | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    logprobs: int | None
    prompt_logprobs: int | None
    echo: bool | None
    n: int | None
    beam_search: BeamSearch | None


@dataclass(frozen=True)
class Resume:
    """How far an earlier answer to a request got, for another to go on after it.

    Attributes:
        seed: the one that the earlier answer reported.
        token_ids: received so far, a list for each candidate.
        finish_reasons: of each candidate, None where it has not ended; shorter than `token_ids`: nor have the others.
            Nothing more comes of one that has.
    """

    seed: int
    token_ids: Sequence[Sequence[int]]
    finish_reasons: Sequence[str | None] = ()


@dataclass(frozen=True)
class TokenLogprobs:
    """How likely the model held a token to be, before any sampling parameter: natural logarithms, -inf included.

    Attributes:
        token_id: the token that stands in the text.
        logprob: its own.
        rank: 1 for the likeliest of all tokens.
        top: by token id, those of the likeliest tokens, likeliest first, as many as were asked for.
    """

    token_id: int
    logprob: float
    rank: int
    top: Mapping[int, float]


@dataclass(frozen=True)
class GivenPrompt:
    """What the model was given, a branch's tokens included.

    Attributes:
        token_ids: with `echo`.
        text: the same as text; special tokens have none.
        logprobs: with `prompt_logprobs`, one for each token, None for the first.
    """

    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs | None]


@dataclass(frozen=True)
class Beam:
    """A beam of a search that goes on."""

    token_ids: list[int]
    text: str
    score: float


@dataclass(frozen=True)
class Delta:
    """What one candidate gained: `token_ids` begin at `position` of its answer.

    Attributes:
        finish_reason: None until the candidate's last delta: "stop" (end-of-sequence or stop token, stop string) or
            "length" (`max_tokens` or the context).
        logprobs: one for each token, if they were asked for.
        cumulative_logprob: in the last delta, if they were asked for: the sum over the candidate's `logprobs`.
        score: in a beam search's.
    """

    index: int
    position: int
    token_ids: list[int]
    text: str
    finish_reason: str | None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cumulative_logprob: float | None = None
    score: float | None = None


@dataclass
class Candidate:
    """One candidate, as far as it has come; of what `resume` said of it, only its end is repeated."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cumulative_logprob: float | None = None
    score: float | None = None


@dataclass(frozen=True)
class Usage:
    """Tokens of one request, over all its candidates; see types.proto for each.

    Prompt and completion are those of the whole answer. Of an answer whose connection was lost, the others are the last
    stream's: what it found in the cache, what this client had received before, what was computed again for it.
    """

    prompt_tokens: int
    cached_tokens: int
    resumed_tokens: int
    recomputed_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class ModelInfo:
    """A model that is served; `max_context_length` is the most tokens of prompt and answer together."""

    name: str
    vocab_size: int
    max_context_length: int
