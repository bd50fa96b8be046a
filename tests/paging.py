"""Sequences on shuffled, scattered blocks of a pool, and the batches that a runner would build for them."""

import itertools
import random
from typing import NamedTuple

import torch

from kernels.interface import AttentionBatch
from kernels.kv_layout import NULL_BLOCK, KvLayout
from kernels.kv_pool import KvPool


class Chunk(NamedTuple):
    """Tokens `start` to `stop` of a sequence, to be computed in one step."""

    sequence: int
    start: int
    stop: int


class PagedPool:
    """A pool filled with one value, and block tables of sequences in it."""

    def __init__(self, layout: KvLayout, num_blocks: int, fill: float = float("nan"), seed: int = 0) -> None:
        self.kv = KvPool.over(torch.empty(num_blocks * layout.block_bytes, dtype=torch.uint8), layout, num_blocks)
        self.kv.blocks.fill_(fill)
        if self.kv.scales is not None:
            self.kv.scales.fill_(fill)
        self.tables: list[list[int]] = []
        self._layout = layout
        self._free = random.Random(seed).sample(range(1, num_blocks), num_blocks - 1)

    def open(self, num_tokens: int) -> int:
        """Give a new sequence blocks for `num_tokens`; returns its number."""
        self.tables.append([self._free.pop() for _ in range(self._layout.blocks_for(num_tokens))])
        return len(self.tables) - 1

    def slots(self, sequence: int, start: int, stop: int) -> list[int]:
        """Slots of a sequence's tokens."""
        size = self._layout.block_size
        return [self.tables[sequence][i // size] * size + i % size for i in range(start, stop)]

    def batch(self, chunks: list[Chunk]) -> AttentionBatch:
        """The batch of these chunks, of which those with one token must come first."""
        width = max(len(self.tables[chunk.sequence]) for chunk in chunks)
        tables = [self.tables[chunk.sequence] for chunk in chunks]
        padded = [table + [NULL_BLOCK] * (width - len(table)) for table in tables]
        slots = [slot for chunk in chunks for slot in self.slots(*chunk)]
        query_lengths = [chunk.stop - chunk.start for chunk in chunks]
        return attention_batch(slots, padded, query_lengths, [chunk.stop for chunk in chunks])


def attention_batch(
    slots: list[int], tables: list[list[int]], query_lengths: list[int], context_lengths: list[int]
) -> AttentionBatch:
    """The batch of sequences on the CPU, of which those with one new token must come first."""
    return AttentionBatch(
        slot_mapping=torch.tensor(slots),
        block_tables=torch.tensor(tables),
        query_starts=torch.tensor([0, *itertools.accumulate(query_lengths)]),
        context_ends=torch.tensor(context_lengths),
        query_lengths=query_lengths,
        context_lengths=context_lengths,
        num_decodes=query_lengths.count(1),
    )
