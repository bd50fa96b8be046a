"""What one step computes, and what comes of it."""

from dataclasses import dataclass
from typing import NamedTuple

from model_runner.sequence import FinishReason, Sequence
from pagekeeper.common.operations import BlockCopy


class Scheduled(NamedTuple):
    """The sequence computes its next `num_tokens` tokens in this step."""

    sequence: Sequence
    num_tokens: int

    @property
    def samples(self) -> bool:
        """The step reaches the last known token, so it yields the next one."""
        return self.sequence.num_computed + self.num_tokens == len(self.sequence.token_ids)


@dataclass(frozen=True)
class Step:
    """Work of one step: `copies` come before any write, then `entries`, those with a single token first."""

    entries: list[Scheduled]
    copies: list[BlockCopy]

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(entry.num_tokens for entry in self.entries)


class Output(NamedTuple):
    """One sequence's news of a step: a token at `position` of the answer, the end, or both."""

    sequence: Sequence
    position: int
    token_id: int | None
    finish_reason: FinishReason | None
