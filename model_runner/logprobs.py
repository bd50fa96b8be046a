"""How likely the model held tokens to be, on the host; see TokenLogprobs in types.proto."""

from dataclasses import dataclass, field
from typing import NamedTuple


class TokenLogprobs(NamedTuple):
    """Of one token, by the model's own logits."""

    token_id: int
    logprob: float
    rank: int
    """One more than the number of tokens that are likelier."""
    top_token_ids: list[int]
    top_logprobs: list[float]


@dataclass(eq=False)
class PromptLogprobs:
    """Those of a prompt, which all sequences of a request share: whichever computes the prompt brings them."""

    num_top: int
    """How many of the likeliest tokens are wanted with each."""
    num_wanted: int
    """All of the prompt but its first token."""
    found: list[TokenLogprobs] = field(default_factory=list)
    """Of the tokens from the second on, as far as they have been computed."""
    is_sent: bool = False
    """Kept by whoever sends them, once, to the gateway."""

    @property
    def is_complete(self) -> bool:
        """Nothing is left to compute."""
        return len(self.found) == self.num_wanted

    def take_in(self, position: int, found: list[TokenLogprobs]) -> None:
        """Add what comes of computing the prompt from `position` on, whose token tells of the one after it.

        A prompt that is computed again, after a preemption, brings the same once more.
        """
        self.found += found[len(self.found) - position :]
