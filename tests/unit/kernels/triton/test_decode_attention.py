"""Paged decode attention against the specification, interpreted, on pools that hold NaN wherever no token is."""

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from kernels.interface import AttentionBatch, AttentionParams
from kernels.kv_layout import KvLayout
from kernels.kv_pool import KvPool
from kernels.reference import prepare_attention
from kernels.triton.decode_attention import attend_decodes, launch_decodes, plan_shape
from kernels.triton.decode_plan import Device, plan_decodes
from tests.paging import Chunk, PagedPool, attention_batch

LAYER = 1
SMALL_PIECE = 64
"""Tokens, so that contexts that an interpreter can bear are cut into several pieces."""
DEVICE = Device(capability=90, multiprocessors=4)
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
EDGES = [1, 16, 17, 64, 65, 130]
"""Context lengths around the edges of blocks, tiles and pieces."""


@dataclass(frozen=True)
class Case:
    """A pool of random K and V, and one decode for each of `lengths`."""

    layout: KvLayout
    lengths: Sequence[int]
    group: int = 2
    shared_blocks: int | None = None
    query_dtype: torch.dtype | None = None

    def pool(self, fill: float = float("nan")) -> PagedPool:
        """Sequences on scattered blocks, all with the same leading ones; what they do not use is `fill`."""
        pool = PagedPool(self.layout, 2 + sum(map(self.layout.blocks_for, self.lengths)), fill)
        generator = torch.Generator().manual_seed(2)
        for length in self.lengths:
            sequence = pool.open(length)
            pool.tables[sequence][: self.shared_blocks or 0] = pool.tables[0][: self.shared_blocks or 0]
            slots = torch.tensor(pool.slots(sequence, 0, length))
            self._fill(pool.kv, slots // self.layout.block_size, slots % self.layout.block_size, generator)
        return pool

    def _fill(self, kv: KvPool, block: torch.Tensor, offset: torch.Tensor, generator: torch.Generator) -> None:
        shape = (len(block), *self.layout.block_shape[:3], self.layout.head_dim)
        values = torch.randn(shape, generator=generator)
        if kv.scales is not None:
            # Scales of many sizes; elements from subnormal to near the largest.
            kv.scales[block, :, :, :, offset] = 0.02 * torch.rand(shape[:-1], generator=generator).exp2()
            values = values.sign() * (values * 3).exp2().clamp(0.002, 400)
            kv.scales[block, :, :, :, offset] /= values.abs().amax(-1) / 64
        kv.blocks[block, :, :, :, offset] = values.to(kv.blocks.dtype)

    def batch(self, pool: PagedPool) -> AttentionBatch:
        """Of all sequences."""
        batch = pool.batch([Chunk(i, length - 1, length) for i, length in enumerate(self.lengths)])
        shared = None if self.shared_blocks is None else torch.tensor([self.shared_blocks])
        return replace(batch, shared_blocks=shared)

    def query(self) -> torch.Tensor:
        """Of all sequences, in the middle of a larger tensor."""
        dtype = self.query_dtype or getattr(torch, self.layout.dtype)
        heads = self.group * self.layout.num_kv_heads
        shape = (len(self.lengths), heads + 3, self.layout.head_dim)
        return torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(dtype)[:, :heads]

    def params(self, window: int | None = None, cap: float | None = None) -> AttentionParams:
        """Scores are spread enough for a few tokens to matter most."""
        return AttentionParams(2 * self.layout.head_dim**-0.5, window, cap)


def attend(kv: KvPool, batch: AttentionBatch, query: torch.Tensor, params: AttentionParams, least: int) -> torch.Tensor:
    """Decode attention with contexts cut into pieces of `least` tokens or more."""
    out = torch.full(query.shape, float("nan"), dtype=query.dtype)
    plan = plan_decodes(plan_shape(query, kv, batch, params), DEVICE, least)
    launch_decodes(plan, out, query, kv, LAYER, batch, params)
    return out


def check(case: Case, window: int | None = None, cap: float | None = None, least: int = SMALL_PIECE) -> None:
    """Compare with the specification. Queries of 16 bits meet K and V of a quantised pool in bfloat16."""
    pool, query, params = case.pool(), case.query(), case.params(window, cap)
    batch = case.batch(pool)
    expected = prepare_attention(batch, pool.kv, params).attend(LAYER, query.float())
    out = attend(pool.kv, batch, query, params, least)
    tolerance = TOLERANCES[query.dtype]
    if pool.kv.scales is not None and query.dtype != torch.float32:
        tolerance = TOLERANCES[torch.bfloat16]
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("head_dim", "group", "block_size", "dtype"),
    [
        (64, 1, 8, "float32"),
        (64, 7, 16, "bfloat16"),
        (64, 3, 128, "float16"),
        (80, 3, 16, "float32"),
        (80, 8, 8, "float16"),
        (96, 6, 32, "float32"),
        (96, 5, 128, "bfloat16"),
        (128, 5, 64, "float32"),
        (128, 8, 16, "bfloat16"),
        (128, 1, 8, "float16"),
        (256, 2, 16, "float32"),
        (256, 20, 32, "bfloat16"),
    ],
)
def test_case_34_head_shapes_that_are_no_power_of_two(head_dim: int, group: int, block_size: int, dtype: str) -> None:
    """Case 34: every head_dim, GQA group and block size, with contexts around the edges of blocks, tiles and pieces."""
    check(Case(KvLayout(2, 2 if block_size == 16 else 1, block_size, head_dim, dtype), EDGES, group))


@pytest.mark.parametrize("least", [SMALL_PIECE, 256])
def test_a_context_in_pieces_gives_what_a_whole_one_gives(least: int) -> None:
    check(Case(KvLayout(2, 1, 16, 64, "float32"), [1, 300, 256, 257, 520], 4), least=least)


@pytest.mark.parametrize(
    ("head_dim", "block_size", "query"),
    [(64, 16, torch.float32), (80, 8, torch.float32), (128, 128, torch.bfloat16), (96, 32, torch.float16)],
)
def test_a_quantised_pool_is_read_with_its_scales(head_dim: int, block_size: int, query: torch.dtype) -> None:
    layout = KvLayout(2, 1, block_size, head_dim, "float8_e4m3fn")
    check(Case(layout, [1, 17, 64, 130], 3, query_dtype=query))


@pytest.mark.parametrize(("window", "block_size"), [(1, 16), (7, 8), (8, 8), (9, 8), (64, 128), (70, 16)])
def test_a_sliding_window_hides_what_is_further_back(window: int, block_size: int) -> None:
    check(Case(KvLayout(2, 1, block_size, 64, "float32"), [1, 8, 71, 200], 3), window)


def test_blocks_before_the_window_are_not_even_looked_up() -> None:
    case = Case(KvLayout(2, 1, 8, 64, "float32"), [200])
    pool = case.pool()
    pool.tables[0][:20] = [10**9] * 20  # tokens 0 to 159
    batch, query = case.batch(pool), case.query()
    out = attend(pool.kv, batch, query, case.params(40), SMALL_PIECE)
    assert out.isfinite().all()


@pytest.mark.parametrize("kv", ["float32", "float8_e4m3fn"])
def test_a_soft_cap_bends_scores(kv: str) -> None:
    case = Case(KvLayout(2, 2, 16, 64, kv), [1, 64, 130], 3, query_dtype=torch.float32)
    check(case, cap=3.0)
    check(case, window=50, cap=3.0)


@pytest.mark.parametrize(
    ("kv", "shared_blocks"),
    [("float32", 0), ("float32", 1), ("float32", 7), ("float16", 5), ("float8_e4m3fn", 0), ("float8_e4m3fn", 7)],
)
def test_a_shared_prefix_is_a_hint(kv: str, shared_blocks: int) -> None:
    """From none to all but the tail of the shortest context (7 blocks of 16 and one token)."""
    lengths = [113, 200, 114, 128]
    query = torch.float16 if kv == "float16" else torch.float32
    check(Case(KvLayout(2, 1, 16, 64, kv), lengths, 3, shared_blocks, query))


def test_a_shared_prefix_serves_more_rows_than_a_tile_has() -> None:
    check(Case(KvLayout(2, 1, 16, 64, "bfloat16"), [100 + i for i in range(10)], 7, shared_blocks=6), cap=5.0)


def test_a_shared_prefix_and_a_window_go_together() -> None:
    check(Case(KvLayout(2, 1, 16, 64, "float32"), [100, 130, 97], 2, shared_blocks=6), window=40)


@pytest.mark.parametrize(
    ("kv", "window", "shared_blocks"),
    [("float16", 11, None), ("bfloat16", None, 0), ("float8_e4m3fn", None, None)],
)
def test_case_02_garbage_in_unused_slots_does_not_leak(kv: str, window: int | None, shared_blocks: int | None) -> None:
    """Case 2: with NaN in every unused slot, context lengths 1 to 2B+1 give the same bits as on a zero-filled pool."""
    query = torch.bfloat16 if kv == "float8_e4m3fn" else None
    case = Case(KvLayout(2, 1, 8, 64, kv), [*range(1, 18), 81], 2, shared_blocks, query)
    pools = [case.pool(fill) for fill in (0.0, float("nan"))]
    clean, poisoned = (attend(pool.kv, case.batch(pool), case.query(), case.params(window), 64) for pool in pools)
    assert torch.equal(clean, poisoned)
    assert clean.isfinite().all()


@pytest.mark.parametrize("kv", ["float32", "float8_e4m3fn"])
def test_case_03_block_ids_beyond_two_gibibytes(kv: str) -> None:
    """Case 3: blocks so far apart that bytes, elements and scales lie past 2³¹ give what neighbouring ones give."""
    case = Case(KvLayout(2, 2, 16, 64, kv), [40, 21], 2, query_dtype=torch.float32)
    near = case.pool()
    stride = 2**31 + 2**20
    far = far_apart(case.layout, near.kv.raw, stride * 4)
    outs = [attend(kv, case.batch(near), case.query(), case.params(), SMALL_PIECE) for kv in (near.kv, far)]
    assert outs[0].isfinite().all()
    assert torch.equal(*outs)


def far_apart(layout: KvLayout, raw: torch.Tensor, stride: int) -> KvPool:
    """The blocks of `raw` with `stride` bytes from one to the next, in memory of which only touched pages exist."""
    num_bytes = raw.shape[0] * stride
    descriptor = os.memfd_create("sparse-pool")
    os.ftruncate(descriptor, num_bytes)
    memory = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
    os.close(descriptor)
    spread = memory.as_strided(raw.shape, (stride, 1))
    spread.copy_(raw)
    blocks = spread[:, : layout.data_bytes].view(getattr(torch, layout.dtype)).unflatten(1, layout.block_shape)
    scales = None
    if layout.scale_shape is not None:
        scales = spread[:, layout.data_bytes :].view(torch.float32).unflatten(1, layout.scale_shape)
    return KvPool(spread, blocks, scales)


@pytest.mark.parametrize(("shared_blocks", "least"), [(None, SMALL_PIECE), (None, 4096), (2, SMALL_PIECE)])
def test_a_graph_is_replayed_with_other_lengths_and_padding(shared_blocks: int | None, least: int) -> None:
    """What the host said when the graph was captured are upper bounds; sequences of no tokens come last."""
    case = Case(KvLayout(2, 1, 16, 64, "float32"), [70, 41, 150, 33, 33], 2, shared_blocks)
    pool, query, params = case.pool(), case.query(), case.params()
    batch = case.batch(pool)
    expected = attend(pool.kv, batch, query, params, SMALL_PIECE)
    batch.context_ends[3:] = 0
    batch.block_tables[3:] = 0
    replayed = replace(batch, context_lengths=[4096] * 5)
    out = attend(pool.kv, replayed, query, params, least)
    torch.testing.assert_close(out[:3], expected[:3])


def test_only_rows_of_decodes_are_written() -> None:
    case = Case(KvLayout(2, 1, 16, 64, "float32"), [70, 41])
    pool, query = case.pool(), case.query()
    batch = case.batch(pool)
    out = torch.full((4, *query.shape[1:]), 7.0)
    attend_decodes(out, query.repeat(2, 1, 1), pool.kv, LAYER, batch, case.params())
    expected = prepare_attention(batch, pool.kv, case.params()).attend(LAYER, query)
    torch.testing.assert_close(out[:2], expected, rtol=2e-5, atol=2e-5)
    assert (out[2:] == 7).all()
    attend_decodes(out, query, pool.kv, LAYER, replace(batch, num_decodes=0), case.params())


def test_a_neighbour_changes_a_sequence_by_no_more_than_the_order_of_summation() -> None:
    lengths = [40, 3, 200, 61]
    case = Case(KvLayout(2, 1, 16, 64, "float32"), lengths, 3)
    pool, query = case.pool(), case.query()
    together = attend(pool.kv, case.batch(pool), query, case.params(), SMALL_PIECE)
    for i, length in enumerate(lengths):
        batch = attention_batch([0], [pool.tables[i]], [1], [length])
        alone = attend(pool.kv, batch, query[i : i + 1], case.params(), SMALL_PIECE)
        torch.testing.assert_close(alone, together[i : i + 1])
