"""Requests as long as those of Alpaca and ShareGPT that arrive at random, for measurements without a model.

The PagedAttention paper (arXiv 2309.06180) states the means of these lengths alone. Their shapes are those of public
data: 4,998 instructions of Stanford Alpaca, each with the token that OPT's tokenizer puts first, and 30,058 turns of
ShareGPT conversations, all that fit the 2,048 tokens of the paper's models. They are stretched to the paper's means.
"""

import math
import random
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

_GOLDEN = (math.sqrt(5) - 1) / 2
_LEVELS = [*(level / 20 for level in range(20)), 0.98, 0.99, 1.0]


class Lengths(NamedTuple):
    """A distribution of lengths in tokens.

    Attributes:
        mean: what it is stretched to.
        shape: lengths at each of `_LEVELS` of the distribution function; between two of them it is linear.
    """

    mean: float
    shape: list[int]

    def at(self, levels: list[float]) -> list[int]:
        """The lengths at these levels, stretched to the mean as they are; none is shorter than a token."""
        lengths = np.interp(levels, _LEVELS, self.shape)
        return [max(1, round(length)) for length in lengths * (self.mean / lengths.mean())]


class Dataset(NamedTuple):
    """What is asked and answered."""

    name: str
    prompts: Lengths
    answers: Lengths


_ALPACA_ANSWERS = Lengths(
    58.5, [1, 4, 7, 9, 11, 14, 17, 22, 28, 35, 44, 52, 60, 69, 77, 85, 96, 107, 124, 160, 221, 264, 587]
)
_ALPACA_PROMPTS = Lengths(
    19.3, [5, 8, 9, 10, 11, 11, 12, 13, 13, 14, 15, 16, 17, 19, 20, 22, 24, 27, 32, 41, 59, 71, 238]
)
_SHAREGPT_ANSWERS = Lengths(
    337.9,
    [2, 44, 84, 130, 180, 227, 270, 310, 344, 378, 413, 450, 489, 530, 576, 623, 678, 747, 826, 916, 973, 996, 1024],
)
_SHAREGPT_PROMPTS = Lengths(
    161.3, [1, 3, 7, 9, 12, 14, 16, 19, 22, 25, 29, 34, 40, 48, 59, 75, 98, 142, 238, 518, 1018, 1193, 2030]
)
ALPACA = Dataset("Alpaca", _ALPACA_PROMPTS, _ALPACA_ANSWERS)
SHAREGPT = Dataset("ShareGPT", _SHAREGPT_PROMPTS, _SHAREGPT_ANSWERS)


@dataclass(frozen=True)
class Arrival:
    """A request: when it comes, in steps, and how long prompt and answer are."""

    step: float
    num_prompt_tokens: int
    num_answer_tokens: int


def trace(dataset: Dataset, num_requests: int, steps_between: float, rng: random.Random) -> list[Arrival]:
    """Poisson arrivals.

    Every level of the distribution function occurs once, so that few requests stand for all. Prompt and answer are
    paired by multiples of the golden ratio, which leaves them uncorrelated. In ShareGPT they are: 0.03. In Alpaca long
    prompts have shorter answers, -0.12; paired as they are there, prompts would be less of what candidates hold, and 2
    and 6 candidates save 5.4 and 9.0 % instead of 6.3 and 10.4 %.
    """
    levels = [(index + 0.5) / num_requests for index in range(num_requests)]
    prompts = dataset.prompts.at(levels)
    answers = dataset.answers.at([index * _GOLDEN % 1 for index in range(num_requests)])
    pairs = list(zip(prompts, answers, strict=True))
    rng.shuffle(pairs)
    step, arrivals = 0.0, []
    for num_prompt_tokens, num_answer_tokens in pairs:
        arrivals.append(Arrival(step, num_prompt_tokens, num_answer_tokens))
        step += rng.expovariate(1 / steps_between)
    return arrivals
