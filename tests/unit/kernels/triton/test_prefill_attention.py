"""Prefill attention against the specification, interpreted."""

import itertools
from dataclasses import replace

import pytest
import torch

from kernels import reference
from kernels.interface import AttentionBatch, AttentionParams
from kernels.kv_layout import KvLayout
from kernels.kv_pool import KvPool
from kernels.triton.prefill_attention import attend_prefills, launch_prefills
from kernels.triton.prefill_tuning import LONG, SHORT, choose_prefill_tiling
from kernels.triton.tuning import Tiling
from tests.paging import Chunk, PagedPool

LAYER = 1
"""The other layer of the pool is never filled."""
SMALL = Tiling(tile=16, num_warps=4, num_stages=2, resident=1, rows=16)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DECODES_AND_PREFILLS = [(7, 8), (0, 9), (5, 40), (30, 47), (60, 70)]


def fill(kv: KvPool, layout: KvLayout, slots: list[int], generator: torch.Generator) -> None:
    """Random K and V for a sequence's tokens."""
    values = torch.randn(len(slots), 2, layout.num_kv_heads, layout.head_dim, generator=generator)
    where = torch.tensor(slots) // layout.block_size, LAYER, slice(None), slice(None)
    in_block = torch.tensor(slots) % layout.block_size
    if kv.scales is None:
        kv.blocks[*where, in_block] = values.to(kv.blocks.dtype)
        return
    kv.scales[*where, in_block] = torch.rand(values.shape[:3], generator=generator) / 10 + 0.1
    kv.blocks.view(torch.uint8)[*where, in_block] = (values * 8).to(kv.blocks.dtype).view(torch.uint8)


def paged(
    layout: KvLayout, chunks: list[tuple[int, int]], unused: float = float("nan")
) -> tuple[KvPool, AttentionBatch]:
    """A pool with these chunks' contexts in one layer, and the batch; everything else in the pool is `unused`."""
    pool = PagedPool(layout, 3 + sum(layout.blocks_for(stop) for _, stop in chunks), unused)
    generator = torch.Generator().manual_seed(1)
    for _, stop in chunks:
        fill(pool.kv, layout, pool.slots(pool.open(stop), 0, stop), generator)
    return pool.kv, pool.batch([Chunk(i, *chunk) for i, chunk in enumerate(chunks)])


def check(
    layout: KvLayout,
    group: int,
    chunks: list[tuple[int, int]],
    dtype: torch.dtype,
    params: AttentionParams | None = None,
    tiling: Tiling | None = None,
) -> None:
    """Compare with the specification, on poisoned and, bit for bit, on zero-filled unused slots."""
    params = params or AttentionParams(layout.head_dim**-0.5)
    tokens = sum(stop - start for start, stop in chunks)
    qkv = torch.randn(
        tokens, (group + 2) * layout.num_kv_heads, layout.head_dim, generator=torch.Generator().manual_seed(2)
    )
    query = qkv.to(dtype)[:, : group * layout.num_kv_heads]
    outs = []
    for unused in (float("nan"), 0.0):
        kv, batch = paged(layout, chunks, unused)
        out = torch.full(query.shape, float("nan"), dtype=dtype)
        if tiling is None:
            attend_prefills(out, query, kv, LAYER, batch, params)
        else:
            launch_prefills(tiling, out, query, kv, LAYER, batch, params)
        assert out[: batch.num_decodes].isnan().all()
        outs.append(out[batch.num_decodes :])
    assert torch.equal(*outs)
    expected = reference.prepare_attention(batch, kv, params).attend(LAYER, query.float())[batch.num_decodes :]
    torch.testing.assert_close(outs[0].float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("head_dim", "group", "block_size", "dtype"),
    [
        (64, 1, 8, torch.float32),
        (64, 8, 64, torch.bfloat16),
        (80, 3, 16, torch.float16),
        (96, 5, 32, torch.bfloat16),
        (128, 6, 128, torch.float16),
        (128, 7, 16, torch.float16),
        (256, 3, 8, torch.float16),
    ],
)
def test_head_shapes_groups_and_block_sizes(head_dim: int, group: int, block_size: int, dtype: torch.dtype) -> None:
    check(KvLayout(2, 2, block_size, head_dim, str(dtype)[6:]), group, DECODES_AND_PREFILLS, dtype)


def test_heads_as_small_as_those_of_a_tiny_model_are_padded() -> None:
    check(KvLayout(2, 2, 8, 16, "float32"), 2, [(0, 9), (5, 21)], torch.float32)


def test_chunks_begin_and_end_around_edges_of_blocks_and_tiles() -> None:
    edges = [0, 1, 7, 8, 15, 16, 17]
    chunks = [(start, stop) for start, stop in itertools.combinations(edges, 2) if stop > start + 1]
    check(KvLayout(2, 1, 8, 64, "float32"), 3, chunks, torch.float32, tiling=SMALL)


def test_a_block_may_hold_several_tiles_and_a_tile_several_blocks() -> None:
    for block_size in (8, 64):
        layout = KvLayout(2, 1, block_size, 64, "float32")
        check(layout, 2, [(0, 70), (33, 70)], torch.float32, tiling=replace(SMALL, tile=32))


def test_every_program_finds_its_sequence_among_many() -> None:
    chunks = [(3, 4)] * 5 + [(i % 5, i % 5 + 2 + i % 3) for i in range(13)]
    check(KvLayout(2, 1, 8, 64, "float16"), 5, chunks, torch.float16, tiling=SMALL)


@pytest.mark.parametrize("window", [1, 7, 16, 17, 40, 1000])
def test_a_sliding_window_hides_what_is_further_back(window: int) -> None:
    chunks = [(0, 9), (20, 50), (64, 67)]
    params = AttentionParams(0.125, window)
    check(KvLayout(2, 1, 8, 64, "float32"), 3, chunks, torch.float32, params, replace(SMALL, rows=32))


def test_tiles_outside_the_window_are_not_looked_up() -> None:
    layout = KvLayout(2, 1, 8, 64, "float32")
    kv, batch = paged(layout, [(60, 70)])
    query = torch.randn(10, 2, 64, generator=torch.Generator().manual_seed(2))
    params = AttentionParams(0.125, sliding_window=5)
    outs = []
    for nowhere in (0, 2**40):
        batch.block_tables[:, : (60 + 1 - 5) // 16 * 2] = nowhere
        out = torch.empty_like(query)
        launch_prefills(SMALL, out, query, kv, LAYER, batch, params)
        outs.append(out)
    assert torch.equal(*outs)


@pytest.mark.parametrize("window", [None, 20])
def test_a_soft_cap_bounds_scores(window: int | None) -> None:
    params = AttentionParams(0.5, window, soft_cap=2.0)
    check(KvLayout(2, 1, 8, 64, "float32"), 3, [(0, 9), (20, 50)], torch.float32, params, SMALL)


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, torch.float32), (80, torch.float16), (128, torch.bfloat16)])
def test_quantised_blocks_are_read_with_their_scales(head_dim: int, dtype: torch.dtype) -> None:
    layout = KvLayout(2, 2, 16, head_dim, "float8_e4m3fn")
    check(layout, 3, DECODES_AND_PREFILLS, dtype, AttentionParams(head_dim**-0.5, 30), replace(SMALL, rows=64, tile=32))


def test_tables_may_be_rows_of_a_wider_one() -> None:
    layout = KvLayout(2, 1, 8, 64, "float32")
    kv, batch = paged(layout, [(0, 9), (5, 30)])
    query = torch.randn(34, 2, 64, generator=torch.Generator().manual_seed(2))
    outs = []
    for wide in (batch.block_tables, torch.cat((batch.block_tables, torch.full((2, 3), 2**40)), 1)[:, :-3]):
        out = torch.empty_like(query)
        launch_prefills(SMALL, out, query, kv, LAYER, replace(batch, block_tables=wide), AttentionParams(0.125))
        outs.append(out)
    assert torch.equal(*outs)


def test_a_batch_of_decodes_is_left_alone() -> None:
    kv, batch = paged(KvLayout(2, 1, 8, 64, "float32"), [(7, 8), (3, 4)])
    out = torch.full((2, 3, 64), float("nan"))
    attend_prefills(out, torch.zeros(2, 3, 64), kv, LAYER, batch, AttentionParams(0.125))
    assert out.isnan().all()


def test_short_chunks_have_tiles_of_fewer_rows() -> None:
    long, short = (choose_prefill_tiling(90, 128, 2, rows) for rows in (65, 64))
    assert (long.rows, short.rows) == (128, 64)


def test_a_newer_device_has_the_tiling_of_the_newest_that_is_known() -> None:
    assert choose_prefill_tiling(120, 256, 2, 1000) == LONG[90][256, 2]
    assert choose_prefill_tiling(86, 80, 2, 16) == SHORT[80][128, 2]


def test_a_head_dim_without_tiling_is_refused() -> None:
    with pytest.raises(ValueError, match="head_dim"):
        choose_prefill_tiling(90, 100, 2, 1000)
