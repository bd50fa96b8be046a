"""What one step computes, and what comes of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from model_runner.logprobs import PromptLogprobs, TokenLogprobs
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


class Siblings(NamedTuple):
    """Sequences that part from another one here: they sample from the logits of its last token, too."""

    row: int
    """Which entry that is; it samples."""
    sequences: list[Sequence]


@dataclass(frozen=True)
class Step:
    """Work of one step: `copies` come before any write, then `entries`, those with a single token first."""

    entries: list[Scheduled]
    copies: list[BlockCopy]
    siblings: list[Siblings] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(entry.num_tokens for entry in self.entries)

    def samples(self) -> tuple[list[int], list[Sequence]]:
        """The entries whose logits are sampled, and for which sequence: of the entries, in order, then of siblings."""
        rows = [row for row, entry in enumerate(self.entries) if entry.samples]
        sequences = [self.entries[row].sequence for row in rows]
        for row, siblings in self.siblings:
            rows += [row] * len(siblings)
            sequences += siblings
        return rows, sequences


Continuations = list[tuple[int, float]]
"""The likeliest next tokens of a sequence with their log-probabilities, likeliest first, of equals the lower id."""


class PromptNews(NamedTuple):
    """What a step tells of a prompt's tokens."""

    prompt: PromptLogprobs
    position: int
    """Of the first token that the step computed of it."""
    found: list[TokenLogprobs]
    """Of the token after that one, and of those that follow."""


@dataclass(frozen=True)
class Sampled:
    """What a step's end brings. A sample is a sequence that gains a token; they count in the order of the inputs.

    Columns rather than a row for each sample: most steps bring nothing but tokens.
    """

    token_ids: list[int]
    """One for each sample."""
    logprobs: Mapping[int, list[TokenLogprobs]] = field(default_factory=dict)
    """By sample, for those that ask for them: of its token, or of each of its continuations."""
    continuations: Mapping[int, Continuations] = field(default_factory=dict)
    """By sample, for those with `Sequence.num_continuations`; after everything that changes logits."""
    prompts: list[PromptNews] = field(default_factory=list)


class Hypothesis(NamedTuple):
    """An answer of a beam search, or the beginning of one."""

    token_ids: list[int]
    """Without the stop token that ended it."""
    score: float
    """Sum of the log-probabilities, that of the stop token included, over their number to the length penalty."""
    finish_reason: FinishReason | None
    """None: a running beam."""
    logprobs: list[TokenLogprobs] = []  # noqa: RUF012 - a default that nobody changes
    """Of its tokens, if they were asked for."""


class BeamsOutput(NamedTuple):
    """A beam search's news of a step: the beams that run, or its end, with the answers; best first."""

    leader: Sequence
    hypotheses: list[Hypothesis]
    ended: bool


class Output(NamedTuple):
    """One sequence's news of a step: a token at `position` of the answer, the end, or both."""

    sequence: Sequence
    position: int
    token_id: int | None
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None = None
    """Of the token, if they were asked for."""
