"""The sequences of one beam search, and which of them each beam lives in.

A beam that runs on stays where it was; if it has several continuations, the others fork off into sequences that are
free: such as have no beam, or one that has just been given up.
"""

from typing import NamedTuple

from model_runner.beam_search import BeamSearch, Choice
from model_runner.logprobs import TokenLogprobs
from model_runner.sequence import Sequence
from model_runner.step import Continuations


def most_blocks(width: int, num_prompt_tokens: int, max_total_tokens: int, block_size: int) -> int:
    """Blocks of a search whose beams have nothing in common but the prompt's full blocks."""
    shared = num_prompt_tokens // block_size
    return shared + width * (-(-max_total_tokens // block_size) - shared)


class Move(NamedTuple):
    """What becomes of the beams of a step."""

    given_up: list[Sequence]
    """Those without a continuation."""
    forks: list[tuple[Sequence, list[Sequence]]]
    """Beams with more continuations than one, and the sequences that take the others; some may have been given up."""
    token_ids: dict[Sequence, int]
    """Every beam that runs now, and its new token; the best first."""


class BeamGroup:
    """Which sequence has which beam.

    Args:
        search: the policy.
        sequences: as many as the search is wide, each with the prompt alone; the first one is opened for all.
    """

    def __init__(self, search: BeamSearch, sequences: list[Sequence]) -> None:
        self.search = search
        self.sequences = sequences
        self.restart()

    @property
    def leader(self) -> Sequence:
        """The sequence that is opened, and whose id stands for the search."""
        return self.sequences[0]

    @property
    def num_free(self) -> int:
        """Sequences without a beam."""
        return len(self.sequences) - len(self.beams)

    @property
    def num_recomputed_tokens(self) -> int:
        """See `Usage`."""
        return sum(sequence.num_recomputed_tokens for sequence in self.sequences)

    def restart(self) -> None:
        """Begin again with the prompt."""
        self.search.restart()
        for sequence in self.sequences:
            del sequence.token_ids[sequence.num_prompt_tokens :]
        self.beams = [self.leader]
        self._found: dict[Sequence, Continuations] = {}
        self._logprobs: dict[Sequence, list[TokenLogprobs]] = {}
        self._choices: list[Choice] = []

    def collect(
        self, beam: Sequence, continuations: Continuations, logprobs: list[TokenLogprobs] | None = None
    ) -> bool:
        """Take in how a beam can go on, and what is wanted to be known of these tokens.

        Returns whether that was the last one missing, so that the search went on.
        """
        self._found[beam] = continuations
        self._logprobs[beam] = logprobs or []
        if len(self._found) < len(self.beams):
            return False
        self._choices = self.search.advance(
            [self._found[beam] for beam in self.beams], [self._logprobs[beam] for beam in self.beams]
        )
        self._found, self._logprobs = {}, {}
        return True

    @property
    def has_ended(self) -> bool:
        """The search is over; to be asked when it went on."""
        return not self._choices

    def move(self) -> Move | None:
        """Find a sequence for each beam that runs on; None if the search did not go on since."""
        if not self._choices:
            return None
        parents = [self.beams[choice.parent] for choice in self._choices]
        free = [sequence for sequence in self.sequences if sequence not in parents]
        forks: dict[Sequence, list[Sequence]] = {}
        token_ids: dict[Sequence, int] = {}
        for parent, choice in zip(parents, self._choices, strict=True):
            beam = parent
            if parent in token_ids:
                beam = free.pop()
                forks.setdefault(parent, []).append(beam)
            token_ids[beam] = choice.token_id
        given_up = [beam for beam in self.beams if beam not in parents]
        self.beams = list(token_ids)
        self._choices = []
        return Move(given_up, list(forks.items()), token_ids)
