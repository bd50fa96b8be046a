"""How a text can go on, made up: the likeliest next tokens of a beam, for measurements without a model.

How much beams share is a matter of how fast all but one of an older step's beams die out. That depends on how much the
log-probabilities of two beams come to differ in a step, and so on how sure a model is of the next token, and how
unevenly. The likeliest token's probability is drawn as SmolLM2-135M-Instruct has it: its deciles over the best of four
beams, 24 prompts by 64 tokens. What it leaves falls with the rank as measured there, to the power of -1.65.

Each beam draws by itself, whereas those of a real search often wait for the same word. SmolLM2's own searches show what
that comes to (bench/sharing.py).
"""

import random
from collections.abc import Sequence

import numpy as np

from model_runner.step import Continuations

SMOLLM2_LIKELIEST = (0.042, 0.304, 0.446, 0.581, 0.702, 0.820, 0.907, 0.953, 0.980, 0.996, 1.0)
_FALL = 1.65
_NUM_PROFILES = 200


class LikelyTokens:
    """Draws continuations.

    Args:
        vocabulary: number of token ids.
        most: likeliest tokens that are ever asked for.
        rng: what is random.
        likeliest: probability of the likeliest token at even steps of its distribution function, from 0 to 1.
    """

    def __init__(
        self, vocabulary: int, most: int, rng: random.Random, likeliest: Sequence[float] = SMOLLM2_LIKELIEST
    ) -> None:
        self._last = vocabulary - most
        self._rng = rng
        levels = (np.arange(_NUM_PROFILES) + 0.5) / _NUM_PROFILES
        sure = np.interp(levels, np.linspace(0, 1, len(likeliest)), likeliest)
        fall = np.arange(1, vocabulary) ** -_FALL
        # No other token is likelier than the likeliest one.
        rest = np.minimum(np.outer(1 - sure, fall[: most - 1] / fall.sum()), sure[:, None])
        self._profiles: list[list[float]] = np.log(np.column_stack([sure, rest])).tolist()

    def draw(self, count: int) -> Continuations:
        """The likeliest `count` tokens, likeliest first."""
        first = self._rng.randrange(self._last)
        return list(zip(range(first, first + count), self._rng.choice(self._profiles), strict=False))
