"""How one request's tokens are chosen, and what of it is laid out for the device: always the same arrays, made once."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class BadEnding(NamedTuple):
    """`token_id` must not follow `before`: together they are a bad word of several tokens."""

    before: list[int]
    token_id: int


@dataclass(frozen=True)
class SamplingParams:
    """How a sequence's next token is chosen and when it ends; every default is filled in already.

    See ResolvedSampling in runner.proto. The logits change in the order of `kernels.interface.LogitEdits`: penalties,
    bias, allowed tokens, bans. Of what temperature makes of them, `kernels.interface.SamplingBatch` keeps what top_k,
    of that what top_p, of that what min_p, of that what typical_p leaves, in the order of transformers.
    """

    temperature: float
    """0 is greedy."""
    top_p: float
    top_k: int
    """0 is off."""
    min_p: float
    seed: int
    stop_token_ids: frozenset[int]
    typical_p: float = 1.0
    """1 is off."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """1 is off."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """By token; minus infinity bans it."""
    allowed_token_ids: tuple[int, ...] = ()
    """Empty: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """The last token of each must not follow the others, where the answer has them."""
    min_tokens: int = 0
    """Before the answer has so many tokens, none of `stop_token_ids` is chosen."""
    logprobs: int | None = None
    """How many of the likeliest tokens are wanted with the log-probability of each chosen one; None: not even that."""

    def row(self, candidate: int) -> Ints:
        """[7]: the bits of temperature, top_p, min_p and typical_p as float64, then top_k, seed and `candidate`."""
        row = np.empty(7, np.int64)
        row[:4].view(np.float64)[:] = self.temperature, self.top_p, self.min_p, self.typical_p
        # The 64 bits of the seed, whatever its sign.
        row[4:] = self.top_k, self.seed - (1 << 64) if self.seed >> 63 else self.seed, candidate
        return row

    @cached_property
    def penalises(self) -> bool:
        """What the text has already becomes less likely, or more."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    @cached_property
    def wants_extras(self) -> bool:
        """More is asked for than a token by temperature, top_k, top_p, min_p and typical_p."""
        edits = bool(self.logit_bias or self.allowed_token_ids or self.bad_words) or self.min_tokens > 0
        return self.penalises or edits or self.logprobs is not None

    @cached_property
    def penalty_factors(self) -> Ints:
        """[3, 1]: the bits of the penalties for repetition, presence and frequency as float64."""
        factors = [[self.repetition_penalty], [self.presence_penalty], [self.frequency_penalty]]
        return np.array(factors, np.float64).view(np.int64)

    @cached_property
    def bias(self) -> Ints:
        """[2, n]: tokens, and the bits of what is added to their logits as float64."""
        values = np.array(list(self.logit_bias.values()), np.float64).view(np.int64)
        return np.stack((np.array(list(self.logit_bias), np.int64), values))

    @cached_property
    def allowed(self) -> Ints:
        """[1, n]: the tokens that are allowed, if not all are."""
        return np.array([self.allowed_token_ids], np.int64)

    @cached_property
    def banned(self) -> Ints:
        """[1, n]: the bad words of one token."""
        return np.array([[word[0] for word in self.bad_words if len(word) == 1]], np.int64)

    @cached_property
    def banned_at_first(self) -> Ints:
        """[1, n]: those, and the tokens that end the answer."""
        return np.concatenate((self.banned, np.array([sorted(self.stop_token_ids)], np.int64)), axis=1)

    @cached_property
    def bad_endings(self) -> dict[int, list[BadEnding]]:
        """The bad words of several tokens, by their last token but one."""
        endings: dict[int, list[BadEnding]] = {}
        for *before, token_id in self.bad_words:
            if before:
                endings.setdefault(before[-1], []).append(BadEnding(before, token_id))
        return endings

    @property
    def most_bad_endings(self) -> int:
        """How many of them may hold at once."""
        return max(map(len, self.bad_endings.values()), default=0)
