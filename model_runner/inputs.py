"""One step's inputs as one array of 64-bit words, so that they reach a device by one copy.

What a captured graph reads lies at the front, at offsets that depend on the padded size alone; the block tables, as
wide as this step needs them, and the copies follow. Every section begins on 16 bytes: for a pointer that is aligned
otherwise than before, Triton compiles a kernel anew, which takes seconds.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from model_runner.sampler import SAMPLING_FIELDS, SamplingNeeds
from model_runner.sampling_extras import SamplingExtras

Words = TypeVar("Words", npt.NDArray[np.int64], torch.Tensor)


@dataclass(frozen=True)
class InputLayout:
    """How many of everything, padding included."""

    num_tokens: int
    num_sequences: int
    num_samples: int
    table_width: int
    """Entries of a block table."""
    num_copies: int

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each section begins, in the order of the properties of `InputWords`, and where the last one ends."""
        tokens, samples = _even(self.num_tokens), _even(self.num_samples)
        sizes = (
            tokens,
            tokens,
            tokens,
            _even(self.num_sequences + 1),
            _even(self.num_sequences),
            samples,
            SAMPLING_FIELDS * samples,
            _even(1),
            _even(self.num_sequences * self.table_width),
            2 * self.num_copies,
        )
        return (0, *accumulate(sizes))

    @property
    def num_words(self) -> int:
        """Words of the whole."""
        return self.offsets[-1]


class InputWords(Generic[Words]):
    """The sections of the words; each is a view. Names and contents are those of `DeviceBatch`."""

    def __init__(self, layout: InputLayout, words: Words) -> None:
        self._layout = layout
        self._words: Words = words

    @property
    def token_ids(self) -> Words:
        """[tokens]."""
        return self._section(0, self._layout.num_tokens)

    @property
    def positions(self) -> Words:
        """[tokens]."""
        return self._section(1, self._layout.num_tokens)

    @property
    def slot_mapping(self) -> Words:
        """[tokens]."""
        return self._section(2, self._layout.num_tokens)

    @property
    def query_starts(self) -> Words:
        """[sequences + 1]."""
        return self._section(3, self._layout.num_sequences + 1)

    @property
    def context_ends(self) -> Words:
        """[sequences]."""
        return self._section(4, self._layout.num_sequences)

    @property
    def logit_rows(self) -> Words:
        """[samples]."""
        return self._section(5, self._layout.num_samples)

    @property
    def sampling(self) -> Words:
        """[SAMPLING_FIELDS, samples], each row contiguous; see `sampler`."""
        stride = _even(self._layout.num_samples)
        fields = self._section(6, SAMPLING_FIELDS * stride).reshape(SAMPLING_FIELDS, stride)
        return fields[:, : self._layout.num_samples]

    @property
    def shared_blocks(self) -> Words:
        """[1]."""
        return self._section(7, 1)

    @property
    def block_tables(self) -> Words:
        """[sequences, table_width]."""
        shape = (self._layout.num_sequences, self._layout.table_width)
        return self._section(8, shape[0] * shape[1]).reshape(shape)

    @property
    def copies(self) -> Words:
        """[copies, 2]."""
        return self._section(9, 2 * self._layout.num_copies).reshape(self._layout.num_copies, 2)

    def _section(self, index: int, num_words: int) -> Words:
        first = self._layout.offsets[index]
        section: Words = self._words[first : first + num_words]
        return section


def _even(count: int) -> int:
    """So many words end on 16 bytes."""
    return count + count % 2


@dataclass(frozen=True)
class StepInputs:
    """One step's inputs on the host."""

    layout: InputLayout
    words: npt.NDArray[np.int64]
    """[layout.num_words]."""
    query_lengths: list[int]
    """New tokens of each sequence; padding has one each."""
    context_lengths: list[int]
    """Tokens of each sequence once the step's are computed; padding has none."""
    num_decodes: int
    """The first so many sequences, padding included, have one new token."""
    num_samples: int
    """Tokens to be sampled, padding not included."""
    sampling_needs: SamplingNeeds
    extras: SamplingExtras | None
    """What some of the requests ask for; None if none of them does."""
    has_shared_blocks: bool
    """The decodes begin with blocks in common that are worth reading once for all."""
