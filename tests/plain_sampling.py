"""The rules that logits are edited and tokens are drawn by, once more in plain Python, one row and token at a time."""

import math
import struct
from dataclasses import dataclass, field

from kernels.reference.noise import philox4x32
from model_runner.sampling_params import SamplingParams

WORD = (1 << 32) - 1
DOUBLE_WORD = (1 << 64) - 1


@dataclass
class Row:
    """What one row of logits asks for; nothing by default."""

    prompt: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: dict[int, float] = field(default_factory=dict)
    allowed: set[int] = field(default_factory=set)
    banned: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, params: SamplingParams, prompt: list[int], answer: list[int]) -> "Row":
        """What a sequence asks for once it has this answer."""
        banned = {
            word[-1]
            for word in params.bad_words
            if len(word) == 1 or tuple(answer[-(len(word) - 1) :]) == tuple(word[:-1])
        }
        return cls(
            prompt,
            answer,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            dict(params.logit_bias),
            set(params.allowed_token_ids),
            banned | (params.stop_token_ids if len(answer) < params.min_tokens else set()),
        )

    @property
    def penalised(self) -> bool:
        return (self.repetition, self.presence, self.frequency) != (1.0, 0.0, 0.0)


def edited(logits: list[float], row: Row) -> list[float]:
    """The rules of SamplingParams in types.proto, token by token."""
    result = []
    for token, given in enumerate(logits):
        logit = given
        if token in row.prompt or token in row.answer:
            logit = logit / row.repetition if logit > 0 else logit * row.repetition
        if token in row.answer:
            logit -= row.presence + row.frequency * row.answer.count(token)
        logit = float32(float32(logit) + row.bias.get(token, 0.0))
        if (row.allowed and token not in row.allowed) or token in row.banned:
            logit = -math.inf
        result.append(logit)
    return result


def log_softmax(logits: list[float]) -> list[float]:
    """Natural logarithms of the softmax."""
    highest = max(logits)
    total = math.log(math.fsum(math.exp(logit - highest) for logit in logits))
    return [logit - highest - total for logit in logits]


def split_mix(key: int, count: int) -> list[int]:
    """The first numbers of the SplitMix64 that begins with `key`."""
    numbers = []
    for i in range(1, count + 1):
        number = (key + i * 0x9E3779B97F4A7C15) & DOUBLE_WORD
        number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) & DOUBLE_WORD
        number = ((number ^ number >> 27) * 0x94D049BB133111EB) & DOUBLE_WORD
        numbers.append(number ^ number >> 31)
    return numbers


def signed(word: int) -> int:
    """32 bits as a signed integer."""
    return word - (word >> 31 << 32)


def drawn(weights: list[float], seed: int, candidate: int, position: int) -> int:
    """The token that arrives first, by the rules of `kernels.interface.SamplingBatch`."""
    high, low, _, _ = philox4x32((seed & WORD, seed >> 32 & WORD), (position, candidate, 0, 0))
    halves = [half for number in split_mix(high << 32 | low, len(weights)) for half in (number & WORD, number >> 32)]
    times = {
        token: -math.log(0.5 - (2 * signed(half) + 1) / 2**33) / weight
        for token, (half, weight) in enumerate(zip(halves, weights, strict=False))
        if weight
    }
    return min(times, key=lambda token: times[token])


def float32(value: float) -> float:
    """The nearest number that a tensor of logits can hold."""
    return struct.unpack("f", struct.pack("f", value))[0]
