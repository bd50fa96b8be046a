"""What goes into a client and comes out of it: plain values."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypedDict


@dataclass(frozen=True)
class Message:
    """One turn of a chat; `role` is what the model's template knows: "system", "user", "assistant"."""

    role: str
    content: str


Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]
"""Text as it is, token ids, or the messages of a chat."""


class Sampling(TypedDict, total=False):
    """How tokens are chosen and when to stop; what is absent or None is left to the server. See types.proto."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    max_tokens: int | None
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    n: int | None


@dataclass(frozen=True)
class Resume:
    """How far an earlier stream of a request got, for another to go on after it.

    Attributes:
        seed: the one that the earlier stream reported.
        token_ids: received so far, a list for each candidate.
    """

    seed: int
    token_ids: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Delta:
    """What one candidate gained: `token_ids` begin at `position` of its answer.

    `finish_reason` is None until the candidate's last delta: "stop" (end-of-sequence or stop token, stop string) or
    "length" (`max_tokens` or the context).
    """

    index: int
    position: int
    token_ids: list[int]
    text: str
    finish_reason: str | None


@dataclass
class Candidate:
    """One candidate, as far as a stream has brought it; what the stream resumed is not repeated in it."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(frozen=True)
class Usage:
    """Tokens of one request, over all its candidates; see types.proto for each."""

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
