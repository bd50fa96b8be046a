"""One attention case: a poisoned pool, one step of random sequences in it, and what must come of them."""

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator

import torch

from bench.gpu_check import float64
from bench.gpu_check.cases import AttentionCase
from bench.gpu_check.task import Check, at_most, verified
from kernels.interface import PADDING_SLOT, AttentionBatch, AttentionParams, Kernels
from kernels.kv_layout import NULL_BLOCK
from kernels.kv_pool import KvPool

BOUNDS = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1e-2}
"""Relative error of a result in this type. Matrix units that round float32 to tf32 miss the first by ten times."""
_FP8_BOUND = {"cuda": 4e-2, "cpu": 8e-2}
"""Of stored values: three bits of mantissa, so half a step is 1/16 at most and about 1/40 on average.

Triton's interpreter (3.9) forgets the carry when it rounds up to a power of two: 126 becomes 64 and not 128.
"""
_PADDING = 2
"""Rows that fill up a captured graph."""


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """New tensors are full of NaN, so that an element that nobody writes shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class AttentionRun:
    """A case brought to life.

    Args:
        case: the shapes.
        device: where the tensors live.
        rng: of everything random.
    """

    def __init__(self, case: AttentionCase, device: str, rng: random.Random) -> None:
        self._case = case
        self._device = device
        self._generator = torch.Generator(device).manual_seed(rng.randrange(1 << 62))
        self._dtype: torch.dtype = getattr(torch, case.dtype)
        self._layer = rng.randrange(case.num_layers)
        self.params = AttentionParams(case.head_dim**-0.5, case.sliding_window, case.soft_cap)
        self._tables = self._draw_tables(rng)
        touched = sorted({block for table in self._tables for block in table})
        self._touched = torch.tensor([NULL_BLOCK, *touched], device=device)
        self.pool = self._make_pool()
        self.batch = self._make_batch()
        self._context_slots = self._slots(lambda new, length: range(length - new))
        self._new_slots = self._slots(lambda new, length: range(length - new, length))
        self._fill(float("nan"))
        self._write_context()

    def checks(self, kernels: Kernels) -> Iterator[Check]:
        """Run the step and compare."""
        case, name, bound = self._case, self._case.name, BOUNDS[self._case.dtype]
        tokens = int(self.batch.query_starts[-1])
        qkv = self._normal(tokens, case.num_heads + 2 * case.num_kv_heads, case.head_dim).to(self._dtype)
        angles = self._normal(tokens, case.head_dim // 2)
        cos, sin = angles.cos().repeat(1, 2), torch.cat((-angles.sin(), angles.sin()), -1)
        rotated = float64.rotated(qkv[:, : case.num_heads + case.num_kv_heads], cos, sin)
        value = qkv[:, case.num_heads + case.num_kv_heads :].clone()
        before = self.pool.raw[self._touched].clone()

        attention = kernels.prepare_attention(self.batch, self.pool, self.params)
        attention.rotate_and_store(self._layer, qkv, cos, sin)
        query = qkv[:, : case.num_heads]
        yield at_most(f"{name}: rotated Q", float64.relative_error(query, rotated[:, : case.num_heads]), bound)
        yield from self._check_store(rotated[:, case.num_heads :], value, before)

        with poisoned():
            out = attention.attend(self._layer, query)
        real = self._num_real_tokens
        lengths = [length for _, length in case.steps] + [0] * (_PADDING if case.graph else 0)
        expected = float64.attention(self.batch, lengths, self.pool, self.params, self._layer, query)
        # What is read out of a quantised pool is multiplied as bfloat16, whatever the activations are.
        bound = max(bound, BOUNDS["bfloat16"]) if self.pool.scales is not None else bound
        yield at_most(f"{name}: attention", float64.relative_error(out[:real], expected[:real]), bound)

        written = self._read(torch.cat((self._context_slots, self._new_slots)))
        self._fill(0.0)
        self._write(torch.cat((self._context_slots, self._new_slots)), *written)
        with poisoned():
            again = attention.attend(self._layer, query)
        equal = torch.equal(_bits(out[:real]), _bits(again[:real]))
        figure = "equal bits" if equal else "bits differ"
        yield verified(f"{name}: NaN in unused slots", equal, figure, "equal to zeros there, bit by bit")

    def _check_store(self, key: torch.Tensor, value: torch.Tensor, before: torch.Tensor) -> Iterator[Check]:
        """K `[tokens, num_kv_heads, head_dim]` rotated and V as given are in the new slots; nothing else changed."""
        name, real = self._case.name, self._num_real_tokens
        data, scales = self._read(self._new_slots)
        stored = data.double()[:, self._layer]  # [tokens, 2, num_kv_heads, head_dim]
        bound = BOUNDS[self._case.dtype]
        if scales is not None:
            stored = stored * scales[:, self._layer].double().unsqueeze(-1)
            bound = _FP8_BOUND[self._device]
        yield at_most(f"{name}: stored K", float64.relative_error(stored[:, 0], key[:real]), bound)
        yield at_most(f"{name}: stored V", float64.relative_error(stored[:, 1], value[:real]), bound)
        # Put back what was in the written places: the blocks must then be as they were.
        after = KvPool.over(self.pool.raw[self._touched].clone().flatten(), self._case.layout, len(self._touched))
        old = KvPool.over(before.flatten(), self._case.layout, len(self._touched))
        blocks = torch.searchsorted(self._touched, self._new_slots // self._case.block_size)
        offsets = self._new_slots % self._case.block_size
        for mine, others in ((after.blocks, old.blocks), (after.scales, old.scales)):
            if mine is not None and others is not None:
                _raw(mine)[blocks, self._layer, :, :, offsets] = _raw(others)[blocks, self._layer, :, :, offsets]
        same = torch.equal(after.raw, before)
        yield verified(f"{name}: other slots", same, "untouched" if same else "changed", "untouched")

    def _draw_tables(self, rng: random.Random) -> list[list[int]]:
        case, layout = self._case, self._case.layout
        counts = [layout.blocks_for(length) for _, length in case.steps]
        self._num_blocks = max(2 * sum(counts) + 2, layout.num_blocks(case.pool_bytes))
        # Of a large pool the last tenth, where offsets are largest.
        first = max(1, self._num_blocks * 9 // 10 if case.pool_bytes else 1)
        ids = iter(rng.sample(range(first, self._num_blocks), sum(counts)))
        tables = [list(itertools.islice(ids, count)) for count in counts]
        if case.shared_blocks:
            for table in tables[1:]:
                table[: case.shared_blocks] = tables[0][: case.shared_blocks]
        return tables

    def _make_pool(self) -> KvPool:
        memory = torch.empty(self._num_blocks * self._case.layout.block_bytes, dtype=torch.uint8, device=self._device)
        return KvPool.over(memory, self._case.layout, self._num_blocks)

    def _make_batch(self) -> AttentionBatch:
        case, padding = self._case, _PADDING if self._case.graph else 0
        new = [step[0] for step in case.steps]
        lengths = [step[1] for step in case.steps]
        self._num_real_tokens = sum(new)
        width = max(map(len, self._tables))
        tables = [table + [NULL_BLOCK] * (width - len(table)) for table in self._tables] + [
            [NULL_BLOCK] * width
        ] * padding
        slots = self._slots(lambda count, length: range(length - count, length)).tolist() + [PADDING_SLOT] * padding
        query_lengths = new + [1] * padding
        return AttentionBatch(
            slot_mapping=self._ids(slots),
            block_tables=self._ids(tables),
            query_starts=self._ids([0, *itertools.accumulate(query_lengths)]),
            context_ends=self._ids(lengths + [0] * padding),
            query_lengths=query_lengths,
            context_lengths=[width * case.block_size] * len(query_lengths) if case.graph else lengths,
            num_decodes=query_lengths.count(1),
            shared_blocks=None if case.shared_blocks is None else self._ids([case.shared_blocks]),
        )

    def _slots(self, positions: Callable[[int, int], range]) -> torch.Tensor:
        """Slots of those positions of every sequence, given its new tokens and its length; each slot once."""
        size = self._case.block_size
        slots = [
            table[position // size] * size + position % size
            for table, (new, length) in zip(self._tables, self._case.steps, strict=True)
            for position in positions(new, length)
        ]
        return self._ids(list(dict.fromkeys(slots)))

    def _fill(self, value: float) -> None:
        """Fill every block that may be read by right or by mistake; of a pool on the CPU only those in use."""
        for view in (self.pool.blocks, self.pool.scales):
            if view is not None:
                filling = _raw(torch.tensor([value], device=self._device).to(view.dtype))
                if self._device == "cpu":
                    _raw(view)[self._touched] = filling
                else:
                    _raw(view).copy_(filling.expand_as(_raw(view)))

    def _write_context(self) -> None:
        layout, count = self._case.layout, len(self._context_slots)
        values = self._normal(count, layout.num_layers, 2, layout.num_kv_heads, layout.head_dim)
        if self.pool.scales is None:
            self._write(self._context_slots, values.to(self.pool.blocks.dtype), None)
            return
        scales = torch.rand(values.shape[:-1], generator=self._generator, device=self._device) * 0.02 + 0.001
        self._write(self._context_slots, (values * 100).clamp(-448, 448).to(self.pool.blocks.dtype), scales)

    def _write(self, slots: torch.Tensor, data: torch.Tensor, scales: torch.Tensor | None) -> None:
        blocks, offsets = slots // self._case.block_size, slots % self._case.block_size
        _raw(self.pool.blocks)[blocks, :, :, :, offsets] = _raw(data)
        if self.pool.scales is not None and scales is not None:
            self.pool.scales[blocks, :, :, :, offsets] = scales

    def _read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Of each slot `[num_layers, 2, num_kv_heads, head_dim]` and the scales of that."""
        blocks, offsets = slots // self._case.block_size, slots % self._case.block_size
        data = _raw(self.pool.blocks)[blocks, :, :, :, offsets].view(self.pool.blocks.dtype)
        return data, None if self.pool.scales is None else self.pool.scales[blocks, :, :, :, offsets]

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator, device=self._device)

    def _ids(self, values: list[int] | list[list[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes in a type that can be indexed and compared: float8 cannot."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
