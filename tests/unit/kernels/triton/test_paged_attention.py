"""The assembled attention of decodes and prefills against the specification, interpreted."""

import mmap
import os
from dataclasses import replace

import pytest
import torch

from kernels import reference
from kernels.interface import PADDING_SLOT, AttentionBatch, AttentionParams
from kernels.kv_layout import KvLayout
from kernels.kv_pool import KvPool
from kernels.triton import paged_attention
from kernels.triton.decode_plan import Device
from kernels.triton.paged_attention import prepare_attention
from tests.paging import Chunk, PagedPool, attention_batch

LAYER = 1
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def random_qkv(tokens: int, heads: int, head_dim: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(tokens, heads, head_dim, generator=torch.Generator().manual_seed(seed)).to(dtype)


def angles(tokens: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.rand(tokens, head_dim // 2, generator=torch.Generator().manual_seed(3)) * 6
    return torch.cat((values.cos(), values.cos()), -1), torch.cat((-values.sin(), values.sin()), -1)


def store_contexts(pool: PagedPool, layout: KvLayout, chunks: list[tuple[int, int]], dtype: torch.dtype) -> None:
    """K and V of the tokens before each chunk, by the specification."""
    earlier = [Chunk(i, 0, start) for i, (start, _) in enumerate(chunks) if start]
    if earlier:
        slots = [slot for chunk in earlier for slot in pool.slots(*chunk)]
        batch = replace(attention_batch([0], [[0]], [1], [1]), slot_mapping=torch.tensor(slots))
        attention = reference.prepare_attention(batch, pool.kv, AttentionParams(1.0))
        qkv = random_qkv(len(slots), 2 * layout.num_kv_heads, layout.head_dim, dtype, 1)
        attention.rotate_and_store(LAYER, qkv, *angles(len(slots), layout.head_dim))


def paged(layout: KvLayout, chunks: list[tuple[int, int]], dtype: torch.dtype, unused: float) -> PagedPool:
    pool = PagedPool(layout, 3 + sum(layout.blocks_for(stop) for _, stop in chunks), unused)
    for _, stop in chunks:
        pool.open(stop)
    store_contexts(pool, layout, chunks, dtype)
    return pool


def step(
    kernels: object, kv: KvPool, batch: AttentionBatch, num_heads: int, dtype: torch.dtype, params: AttentionParams
) -> torch.Tensor:
    """A layer's attention: store random K and V of the batch's tokens, and attend."""
    tokens, (num_kv_heads, _, head_dim) = len(batch.slot_mapping), kv.blocks.shape[3:]
    qkv = random_qkv(tokens, num_heads + 2 * num_kv_heads, head_dim, dtype, 2)
    attention = kernels.prepare_attention(batch, kv, params)  # type: ignore[attr-defined]  # a module, see Kernels
    attention.rotate_and_store(LAYER, qkv, *angles(tokens, head_dim))
    return attention.attend(LAYER, qkv[:, :num_heads])


def check(
    layout: KvLayout,
    group: int,
    chunks: list[tuple[int, int]],
    dtype: torch.dtype,
    window: int | None = None,
    cap: float | None = None,
) -> None:
    """Compare with the specification, on poisoned and, bit for bit, on zero-filled unused slots."""
    params = AttentionParams(layout.head_dim**-0.5, window, cap)
    outs = []
    for kernels, unused in ((paged_attention, float("nan")), (paged_attention, 0.0), (reference, float("nan"))):
        pool = paged(layout, chunks, dtype, unused)
        batch = pool.batch([Chunk(i, *chunk) for i, chunk in enumerate(chunks)])
        outs.append(step(kernels, pool.kv, batch, group * layout.num_kv_heads, dtype, params))
    poisoned, clean, expected = outs
    assert torch.equal(poisoned, clean)
    torch.testing.assert_close(poisoned, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("head_dim", "group", "dtype", "kv"),
    [
        (64, 1, torch.float32, "float32"),
        (64, 7, torch.bfloat16, "bfloat16"),
        (80, 3, torch.float16, "float16"),
        (80, 8, torch.float32, "float8_e4m3fn"),
        (96, 6, torch.bfloat16, "bfloat16"),
        (96, 5, torch.float16, "float16"),
        (128, 5, torch.float32, "float8_e4m3fn"),
        (128, 8, torch.float16, "float16"),
    ],
)
def test_case_34_head_shapes_that_are_no_power_of_two(head_dim: int, group: int, dtype: torch.dtype, kv: str) -> None:
    """Case 34: every head_dim and GQA group, in a batch of decodes and prefills on scattered blocks."""
    chunks = [(0, 1), (16, 17), (32, 33), (0, 11), (5, 20), (17, 19)]
    check(KvLayout(2, 2, 8, head_dim, kv), group, chunks, dtype)


def test_case_02_garbage_in_unused_slots_does_not_leak() -> None:
    """Case 2: with NaN in every unused slot, context lengths 1 to 2B+1 give the same bits as on a zero-filled pool."""
    layout = KvLayout(2, 1, 8, 64, "float16")
    lengths = range(1, 2 * layout.block_size + 2)
    decodes, prefills = [(length - 1, length) for length in lengths], [(0, length) for length in lengths[1:]]
    check(layout, 3, decodes + prefills, torch.float16)


def test_case_03_block_ids_beyond_two_gibibytes() -> None:
    """Case 3: blocks whose byte offset passes 2³¹ (and whose element offset does too) give what low ones give."""
    layout = KvLayout(2, 2, 16, 64, "float32")
    high = 2**31 // (layout.block_bytes // 4) + 1  # the first block whose element offset passes 2³¹
    num_blocks = high + 8
    descriptor = os.memfd_create("sparse-pool")
    os.ftruncate(descriptor, num_blocks * layout.block_bytes)  # only the pages that are touched exist
    memory = mmap.mmap(descriptor, num_blocks * layout.block_bytes)
    os.close(descriptor)
    kv = KvPool.over(torch.frombuffer(memory, dtype=torch.uint8), layout, num_blocks)
    outs = []
    for table in ([1, 2, 3], [high + 5, high, high + 7]):
        slots = [table[i // 16] * 16 + i % 16 for i in range(40)]
        for i, j in ((0, 39), (39, 40)):
            batch = attention_batch(slots[i:j], [table], [j - i], [j])
            outs.append(step(paged_attention, kv, batch, 4, torch.float32, AttentionParams(0.125)))
        assert kv.blocks[table[0], LAYER].count_nonzero() > 0
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[1], outs[3])


@pytest.mark.parametrize(("window", "cap"), [(7, None), (None, 5.0), (20, 5.0)])
def test_windows_and_soft_caps_hold_for_decodes_and_prefills(window: int | None, cap: float | None) -> None:
    check(KvLayout(2, 1, 8, 64, "float16"), 4, [(40, 41), (2, 3), (0, 50), (60, 70)], torch.float16, window, cap)


def test_decodes_can_be_replayed_with_other_values_in_the_same_tensors() -> None:
    """As a captured graph is: one sequence and its slot are padding, lengths on the host are upper bounds."""
    layout = KvLayout(2, 2, 8, 64, "float32")
    chunks = [(17, 18), (3, 4)]
    params, dtype = AttentionParams(0.125), torch.float32
    pools = [paged(layout, chunks, dtype, float("nan")) for _ in range(2)]
    batch = pools[0].batch([Chunk(0, 17, 18), Chunk(1, 3, 4)])
    expected = step(reference, pools[0].kv, batch, 6, dtype, params)

    captured = AttentionBatch(
        slot_mapping=torch.full((3,), PADDING_SLOT),
        block_tables=torch.zeros(3, 100, dtype=torch.int64),
        query_starts=torch.arange(4),
        context_ends=torch.zeros(3, dtype=torch.int64),
        query_lengths=[1] * 3,
        context_lengths=[800] * 3,
        num_decodes=3,
    )
    attention = prepare_attention(captured, pools[1].kv, params)
    captured.slot_mapping[:2] = batch.slot_mapping
    captured.block_tables[:2, : batch.block_tables.shape[1]] = batch.block_tables
    captured.context_ends[:2] = batch.context_ends
    qkv = torch.cat((random_qkv(2, 10, 64, dtype, 2), torch.full((1, 10, 64), float("nan"))))
    attention.rotate_and_store(LAYER, qkv, *(torch.cat((x, x[:1])) for x in angles(2, 64)))
    out = attention.attend(LAYER, qkv[:, :6])
    torch.testing.assert_close(out[:2], expected, rtol=2e-5, atol=2e-5)
    assert torch.equal(pools[1].kv.raw, pools[0].kv.raw)


def test_a_pool_whose_heads_no_kernel_has_is_refused() -> None:
    pool = PagedPool(KvLayout(2, 2, 8, 100, "float32"), 4)
    batch = pool.batch([Chunk(pool.open(1), 0, 1)])
    with pytest.raises(ValueError, match="head_dim"):
        prepare_attention(batch, pool.kv, AttentionParams(1.0))


def test_a_quantised_pool_is_refused_where_the_device_cannot_convert(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attention, "find_device", lambda _: Device(80, 108))
    pool = PagedPool(KvLayout(2, 2, 8, 64, "float8_e4m3fn"), 4)
    batch = pool.batch([Chunk(pool.open(1), 0, 1)])
    with pytest.raises(ValueError, match=r"8\.9"):
        prepare_attention(batch, pool.kv, AttentionParams(1.0))
