"""What only some requests ask of a step: edits of logits, log-probabilities, continuations of beams.

Laid out as one array of 64-bit words of its own, apart from the step's inputs, whose size is bounded; a step in which
nobody asks has none. Counts of tokens are kept with each sequence and brought up to date, so a step costs what its
sequences' distinct tokens are, never the vocabulary.
"""

import enum
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kernels.interface import LogitEdits, Penalties
from model_runner.logprobs import PromptLogprobs
from model_runner.sequence import Sequence
from model_runner.token_counts import TokenCounts

Ints = npt.NDArray[np.int64]
Words = TypeVar("Words", Ints, torch.Tensor)


class _Section(enum.IntEnum):
    """The words, one matrix after the other; row means row of logits."""

    PENALISED = 0
    """[1, penalised]: row."""
    FACTORS = 1
    """[3, penalised]: penalties for repetition, presence and frequency, as float64."""
    COUNTED = 2
    """[3, entries]: place in PENALISED, token, how often the answer has it; at the end the last known token of each."""
    BIAS = 3
    """[3, biases]: row, token, value as float64."""
    RESTRICTED = 4
    """[1, restricted]: rows of which only some tokens are allowed."""
    ALLOWED = 5
    """[2, allowed]: row, token."""
    BANNED = 6
    """[2, bans]: row, token; at the end those that depend on the last known token, with room for as many as may be."""
    ROWS = 7
    """[1, rows]: rows whose log-probabilities are wanted."""
    BEAMS = 8
    """[1, beams]: rows of beams."""
    PROMPT = 9
    """[2, prompt tokens]: which token of the step, and the token after it."""


class PromptRows(NamedTuple):
    """Successive tokens of a prompt, each of which tells how likely the next one was."""

    prompt: PromptLogprobs
    position: int
    """Of the first of them in the prompt."""
    next_tokens: list[int]
    """What follows each of them."""


class BeamRow(NamedTuple):
    """A row of logits that a beam goes on from."""

    num_continuations: int
    """How many of the likeliest tokens may continue it."""
    num_top: int | None
    """How many of the likeliest tokens are wanted with the log-probability of each of those; None: not even that."""


@dataclass
class SamplingExtras:
    """One step's extras on the host."""

    words: Ints
    shapes: list[tuple[int, int]]
    """Of each section."""
    rows: dict[int, int]
    """By row of logits, how many of the likeliest tokens are wanted with the log-probability of the chosen one."""
    beams: dict[int, BeamRow]
    """By row of logits."""
    prompts: list[PromptRows]
    penalised: list[Sequence]
    """In the order of the section."""
    watched: list[tuple[int, Sequence]]
    """Row and sequence of those with bad words of several tokens."""
    num_fixed_bans: int
    """Those that do not depend on the last known token."""
    num_bans: int
    """All that hold."""

    def write_last_tokens(self) -> None:
        """Write what depends on the last known tokens, which were not known yet when the rest was laid out."""
        if self.penalised:
            token_ids = [sequence.token_ids[-1] for sequence in self.penalised]
            counts = [_count_of_last(sequence) for sequence in self.penalised]
            self._matrix(_Section.COUNTED, self.words)[1:, -len(self.penalised) :] = token_ids, counts
        self.num_bans = self.num_fixed_bans
        banned = self._matrix(_Section.BANNED, self.words)
        for row, sequence in self.watched:
            for token_id in _forbidden_next(sequence):
                banned[:, self.num_bans] = row, token_id
                self.num_bans += 1

    def view(self, words: torch.Tensor) -> "DeviceExtras":
        """The same as tensors, `words` being these where the step is to run."""
        found = [self._matrix(section, words) for section in _Section]
        penalties = bias = allowed = banned = None
        if self.penalised:
            factors = found[_Section.FACTORS].view(torch.float64)
            penalties = Penalties(found[_Section.PENALISED][0], *factors, *found[_Section.COUNTED])
        if self.shapes[_Section.BIAS][1]:
            rows, token_ids, values = found[_Section.BIAS]
            bias = (rows, token_ids, values.view(torch.float64))
        if self.shapes[_Section.RESTRICTED][1]:
            rows, token_ids = found[_Section.ALLOWED]
            allowed = (found[_Section.RESTRICTED][0], rows, token_ids)
        if self.num_bans:
            rows, token_ids = found[_Section.BANNED][:, : self.num_bans]
            banned = (rows, token_ids)
        prompt_rows, next_tokens = found[_Section.PROMPT]
        num_top = [*self.rows.values(), *(beam.num_top for beam in self.beams.values() if beam.num_top is not None)]
        return DeviceExtras(
            edits=LogitEdits(penalties, bias, allowed, banned),
            rows=found[_Section.ROWS][0],
            beams=found[_Section.BEAMS][0],
            follows_beams=any(beam.num_top is not None for beam in self.beams.values()),
            prompt_rows=prompt_rows,
            next_tokens=next_tokens,
            num_top=max(num_top, default=0),
            num_continuations=max((beam.num_continuations for beam in self.beams.values()), default=0),
            num_prompt_top=max((rows.prompt.num_top for rows in self.prompts), default=0),
        )

    def _matrix(self, section: _Section, words: Words) -> Words:
        first = sum(height * width for height, width in self.shapes[:section])
        height, width = self.shapes[section]
        matrix: Words = words[first : first + height * width].reshape(height, width)
        return matrix


@dataclass(frozen=True)
class DeviceExtras:
    """One step's extras where it runs, all int64 but for what `LogitEdits` says."""

    edits: LogitEdits
    rows: torch.Tensor
    """[wanted]: rows of logits whose log-probabilities are wanted."""
    beams: torch.Tensor
    """[beams]: rows of logits of beams."""
    follows_beams: bool
    """The log-probabilities of what continues some beam are wanted."""
    prompt_rows: torch.Tensor
    """[prompt tokens]: which of the step's tokens."""
    next_tokens: torch.Tensor
    """[prompt tokens]: the tokens after these."""
    num_top: int
    """Most of the likeliest tokens that a row wants."""
    num_continuations: int
    """The same of a beam."""
    num_prompt_top: int
    """The same of a prompt."""


def lay_out_extras(samples: List[Sequence], prompts: Mapping[int, PromptRows]) -> SamplingExtras | None:
    """Lay out what is asked for; None if that is nothing in this step.

    Args:
        samples: the sequence of each row of logits.
        prompts: whose log-probabilities are wanted, by where in the step their tokens begin.
    """
    asking = [(row, sequence) for row, sequence in enumerate(samples) if sequence.wants_extras]
    penalised = [(row, sequence) for row, sequence in asking if sequence.sampling.penalises]
    biased = [(row, sequence) for row, sequence in asking if sequence.sampling.logit_bias]
    restricted = [(row, sequence) for row, sequence in asking if sequence.sampling.allowed_token_ids]
    watched = [(row, sequence) for row, sequence in asking if sequence.sampling.bad_endings]
    beams = {row: BeamRow(s.num_continuations, s.sampling.logprobs) for row, s in asking if s.num_continuations}
    rows = {row: s.sampling.logprobs for row, s in asking if s.sampling.logprobs is not None and row not in beams}
    fixed_bans = [(row, _banned(sequence)) for row, sequence in asking]
    sections = [
        _row(row for row, _ in penalised),
        _join(3, [sequence.sampling.penalty_factors for _, sequence in penalised]),
        _listed(2, [*_counted(penalised), *((place, _blank(2, 1)) for place in range(len(penalised)))]),
        _listed(2, [(row, sequence.sampling.bias) for row, sequence in biased]),
        _row(row for row, _ in restricted),
        _listed(1, [(row, sequence.sampling.allowed) for row, sequence in restricted]),
        _listed(1, [*fixed_bans, *((row, _blank(1, s.sampling.most_bad_endings)) for row, s in watched)]),
        _row(rows),
        _row(beams),
        _join(2, [_prompt_rows(first, prompt) for first, prompt in prompts.items()]),
    ]
    words = np.concatenate([section.ravel() for section in sections])
    if not len(words):
        return None
    extras = SamplingExtras(
        words=words,
        shapes=[(section.shape[0], section.shape[1]) for section in sections],
        rows=rows,
        beams=beams,
        prompts=list(prompts.values()),
        penalised=[sequence for _, sequence in penalised],
        watched=watched,
        num_fixed_bans=sum(token_ids.shape[1] for _, token_ids in fixed_bans),
        num_bans=0,
    )
    extras.write_last_tokens()
    return extras


def _blank(height: int, width: int) -> Ints:
    """To be written when the last token is known."""
    return np.zeros((height, width), np.int64)


def _row(values: Iterable[int]) -> Ints:
    return np.array([list(values)], np.int64)


def _join(height: int, parts: List[Ints]) -> Ints:
    return np.concatenate([_blank(height, 0), *parts], axis=1)


def _listed(height: int, entries: List[tuple[int, Ints]]) -> Ints:
    """[1 + height, n]: `entries [height, n]` one after the other, above each the number of what it belongs to."""
    joined = _join(height, [part for _, part in entries])
    numbers = np.repeat(_row(number for number, _ in entries), [part.shape[1] for _, part in entries], axis=1)
    return np.concatenate((numbers, joined))


def _counted(penalised: List[tuple[int, Sequence]]) -> Iterator[tuple[int, Ints]]:
    """All tokens but the last one, which may not be known yet."""
    for place, (_, sequence) in enumerate(penalised):
        counts = _counts_of(sequence)
        counts.count(sequence.token_ids, len(sequence.token_ids) - 1)
        yield place, counts.entries


def _count_of_last(sequence: Sequence) -> int:
    """How often the answer has the last known token."""
    return _counts_of(sequence).of(sequence.token_ids[-1]) + (sequence.num_generated_tokens > 0)


def _counts_of(sequence: Sequence) -> TokenCounts:
    if sequence.token_counts is None:
        repeats = sequence.sampling.repetition_penalty != 1
        sequence.token_counts = TokenCounts(sequence.num_prompt_tokens, lists_prompt=repeats)
    return sequence.token_counts


def _banned(sequence: Sequence) -> Ints:
    sampling = sequence.sampling
    return sampling.banned_at_first if sequence.num_generated_tokens < sampling.min_tokens else sampling.banned


def _forbidden_next(sequence: Sequence) -> Iterator[int]:
    """Tokens that would complete a bad word."""
    for before, token_id in sequence.sampling.bad_endings.get(sequence.token_ids[-1], ()):
        if len(before) <= sequence.num_generated_tokens and sequence.token_ids[-len(before) :] == before:
            yield token_id


def _prompt_rows(first: int, prompt: PromptRows) -> Ints:
    next_tokens = prompt.next_tokens
    return np.stack((np.arange(first, first + len(next_tokens)), np.array(next_tokens, np.int64)))
