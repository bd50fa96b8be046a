"""One step's inputs as one array of 64-bit words, so that they reach a device by one copy.

What a captured graph reads lies at the front, at offsets that depend on the padded size alone; the block tables, as
wide as this step needs them, and the copies follow.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from model_runner.sampler import SAMPLING_FIELDS, SamplingNeeds

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

    @property
    def num_words(self) -> int:
        """Words of the whole."""
        per_sequence = 2 * self.num_sequences + 1
        sampling = (1 + SAMPLING_FIELDS) * self.num_samples
        tables = self.num_sequences * self.table_width
        return 3 * self.num_tokens + per_sequence + sampling + 1 + tables + 2 * self.num_copies


class InputWords(Generic[Words]):
    """The sections of the words; each is a view. Names and contents are those of `DeviceBatch`."""

    def __init__(self, layout: InputLayout, words: Words) -> None:
        self._layout = layout
        self._words: Words = words
        self._sequences = 3 * layout.num_tokens
        self._samples = self._sequences + 2 * layout.num_sequences + 1
        self._shared = self._samples + (1 + SAMPLING_FIELDS) * layout.num_samples
        self._tables = self._shared + 1
        self._copies = self._tables + layout.num_sequences * layout.table_width

    @property
    def token_ids(self) -> Words:
        """[tokens]."""
        return self._section(0, self._layout.num_tokens)

    @property
    def positions(self) -> Words:
        """[tokens]."""
        return self._section(self._layout.num_tokens, 2 * self._layout.num_tokens)

    @property
    def slot_mapping(self) -> Words:
        """[tokens]."""
        return self._section(2 * self._layout.num_tokens, self._sequences)

    @property
    def query_starts(self) -> Words:
        """[sequences + 1]."""
        return self._section(self._sequences, self._sequences + self._layout.num_sequences + 1)

    @property
    def context_ends(self) -> Words:
        """[sequences]."""
        return self._section(self._sequences + self._layout.num_sequences + 1, self._samples)

    @property
    def logit_rows(self) -> Words:
        """[samples]."""
        return self._section(self._samples, self._samples + self._layout.num_samples)

    @property
    def sampling(self) -> Words:
        """[SAMPLING_FIELDS, samples]: see `sampler`."""
        fields = self._section(self._samples + self._layout.num_samples, self._shared)
        return fields.reshape(SAMPLING_FIELDS, self._layout.num_samples)

    @property
    def shared_blocks(self) -> Words:
        """[1]."""
        return self._section(self._shared, self._tables)

    @property
    def block_tables(self) -> Words:
        """[sequences, table_width]."""
        tables = self._section(self._tables, self._copies)
        return tables.reshape(self._layout.num_sequences, self._layout.table_width)

    @property
    def copies(self) -> Words:
        """[copies, 2]."""
        copies = self._section(self._copies, self._copies + 2 * self._layout.num_copies)
        return copies.reshape(self._layout.num_copies, 2)

    def _section(self, first: int, last: int) -> Words:
        section: Words = self._words[first:last]
        return section


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
    has_shared_blocks: bool
    """The decodes begin with blocks in common that are worth reading once for all."""
