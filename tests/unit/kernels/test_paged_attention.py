"""Paged attention of every backend against the specification, and the specification against attention itself."""

import dataclasses
import mmap
import os
import random

import pytest
import torch
import torch.nn.functional as F

from kernels.cpu.paged_attention import group_by_length
from kernels.interface import PADDING_SLOT, AttentionBatch, AttentionParams, Kernels
from kernels.kv_layout import KvLayout
from kernels.kv_pool import KvPool
from kernels.select import select_kernels
from tests.paging import Chunk, PagedPool, attention_batch

BACKENDS = ["reference", "cpu"]
LAYERS = 2


def run(
    kernels: Kernels, pool: KvPool, batch: AttentionBatch, num_heads: int, window: int | None = None
) -> torch.Tensor:
    """Store random K and V of the batch's tokens in both layers, unrotated, and attend in the second."""
    generator = torch.Generator().manual_seed(1)
    tokens = sum(batch.query_lengths)
    num_kv_heads, head_dim = pool.blocks.shape[3], pool.blocks.shape[5]
    attention = kernels.prepare_attention(batch, pool, AttentionParams(head_dim**-0.5, window))
    for layer in range(LAYERS):
        qkv = torch.randn(tokens, num_heads + 2 * num_kv_heads, head_dim, generator=generator)
        attention.rotate_and_store(layer, qkv, torch.ones(tokens, head_dim), torch.zeros(tokens, head_dim))
    return attention.attend(LAYERS - 1, qkv[:, :num_heads])


def prefilled(layout: KvLayout, lengths: list[int], fill: float = float("nan")) -> PagedPool:
    """A pool with sequences of these lengths, of which K and V of all but the last token are there."""
    pool = PagedPool(layout, 4 + sum(map(layout.blocks_for, lengths)), fill)
    generator = torch.Generator().manual_seed(2)
    for length in lengths:
        sequence = pool.open(length)
        for slot in pool.slots(sequence, 0, length - 1):
            values = torch.randn(layout.num_layers, 2, layout.num_kv_heads, layout.head_dim, generator=generator)
            pool.kv.blocks[slot // layout.block_size, :, :, :, slot % layout.block_size] = values
    return pool


def mixed_chunks(lengths: list[int]) -> list[Chunk]:
    """Decodes of all sequences but the last three, which are prefilled: whole, its tail, and its last two tokens."""
    decodes = [Chunk(i, length - 1, length) for i, length in enumerate(lengths[:-3])]
    whole, tail, two = range(len(lengths) - 3, len(lengths))
    prefills = [
        Chunk(whole, 0, lengths[whole]),
        Chunk(tail, 5, lengths[tail]),
        Chunk(two, lengths[two] - 2, lengths[two]),
    ]
    return decodes + prefills


@pytest.mark.parametrize("group", [1, 3, 5, 6, 7, 8])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_case_34_head_shapes_that_are_no_power_of_two(head_dim: int, group: int) -> None:
    """Case 34: every head_dim and GQA group, in a batch of decodes and prefills on scattered blocks."""
    layout = KvLayout(LAYERS, 2, 8, head_dim, "float32")
    lengths = [1, 2, 9, 17, 33, 11, 20, 19]
    batch = prefilled(layout, lengths).batch(mixed_chunks(lengths))
    expected = run(select_kernels("reference"), prefilled(layout, lengths).kv, batch, 2 * group)
    assert expected.isfinite().all()
    torch.testing.assert_close(run(select_kernels("cpu"), prefilled(layout, lengths).kv, batch, 2 * group), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_case_02_garbage_in_unused_slots_does_not_leak(backend: str) -> None:
    """Case 2: with NaN in every unused slot, context lengths 1 to 2B+1 give the same bits as on a zero-filled pool."""
    layout = KvLayout(LAYERS, 3, 16, 64, "float32")
    kernels = select_kernels(backend)
    for length in range(1, 2 * layout.block_size + 2):
        # The second sequence pads the first one's table, the third is prefilled as a whole.
        lengths = [length, 50, length]
        chunks = [Chunk(0, length - 1, length), Chunk(1, 49, 50), Chunk(2, 0, length)]
        if length == 1:
            chunks = chunks[:2]
        pools = [prefilled(layout, lengths, fill) for fill in (0.0, float("nan"))]
        clean, poisoned = (run(kernels, pool.kv, pool.batch(chunks), 9) for pool in pools)
        assert torch.equal(clean, poisoned)
        assert clean.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_case_03_block_ids_beyond_two_gibibytes(backend: str) -> None:
    """Case 3: blocks whose byte offset passes 2³¹ (and whose element offset does too) give what low ones give."""
    layout = KvLayout(LAYERS, 2, 16, 64, "float32")
    high = 2**31 // (layout.block_bytes // 4) + 1  # the first block whose element offset passes 2³¹
    num_blocks = high + 8
    descriptor = os.memfd_create("sparse-pool")
    os.ftruncate(descriptor, num_blocks * layout.block_bytes)  # only the pages that are touched exist
    memory = mmap.mmap(descriptor, num_blocks * layout.block_bytes)
    os.close(descriptor)
    pool = KvPool.over(torch.frombuffer(memory, dtype=torch.uint8), layout, num_blocks)
    kernels = select_kernels(backend)
    outputs = []
    for table in ([1, 2, 3], [high + 5, high, high + 7]):
        slots = [table[i // 16] * 16 + i % 16 for i in range(40)]
        prefill, decode = (attention_batch(slots[i:j], [table], [j - i], [j]) for i, j in ((0, 39), (39, 40)))
        outputs.append((run(kernels, pool, prefill, 4), run(kernels, pool, decode, 4)))
        kernels.copy_blocks(pool, torch.tensor([[table[0], table[0] + 1]]))
        assert torch.equal(pool.blocks[table[0] + 1], pool.blocks[table[0]])
        assert pool.blocks[table[0]].count_nonzero() > 0
    for low, high_ids in zip(*outputs, strict=True):
        assert torch.equal(low, high_ids)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_result_is_causal_attention_over_the_sequence_alone(backend: str) -> None:
    layout = KvLayout(LAYERS, 2, 8, 64, "float32")
    pool = PagedPool(layout, 16)
    chunk = Chunk(pool.open(21), 0, 21)
    out = run(select_kernels(backend), pool.kv, pool.batch([chunk]), 4)
    generator = torch.Generator().manual_seed(1)
    torch.randn(21, 8, 64, generator=generator)
    query, key, value = torch.randn(21, 8, 64, generator=generator).transpose(0, 1).split((4, 2, 2))
    key, value = key.repeat_interleave(2, 0), value.repeat_interleave(2, 0)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(0, 1))


@pytest.mark.parametrize("window", [1, 7, 8, 9, 100])
def test_a_sliding_window_hides_what_is_further_back(window: int) -> None:
    layout = KvLayout(LAYERS, 2, 8, 64, "float32")
    lengths = [1, 8, 9, 17, 70, 11, 20, 41]
    batch = prefilled(layout, lengths).batch(mixed_chunks(lengths))
    expected = run(select_kernels("reference"), prefilled(layout, lengths).kv, batch, 6, window)
    torch.testing.assert_close(run(select_kernels("cpu"), prefilled(layout, lengths).kv, batch, 6, window), expected)


def test_a_neighbour_changes_a_sequence_by_no_more_than_the_order_of_summation() -> None:
    layout = KvLayout(LAYERS, 3, 16, 64, "float32")
    lengths = [40, 3, 200, 61]
    kernels = select_kernels("cpu")
    alone = []
    for i, length in enumerate(lengths):
        pool = prefilled(layout, lengths)
        query = torch.randn(len(lengths), 9, 64, generator=torch.Generator().manual_seed(3))
        batch = pool.batch([Chunk(i, length - 1, length)])
        attention = kernels.prepare_attention(batch, pool.kv, AttentionParams(0.125))
        attention.rotate_and_store(0, torch.ones(1, 12, 64), torch.ones(1, 64), torch.zeros(1, 64))
        alone.append(attention.attend(0, query[i : i + 1]))
    pool = prefilled(layout, lengths)
    batch = pool.batch([Chunk(i, length - 1, length) for i, length in enumerate(lengths)])
    attention = kernels.prepare_attention(batch, pool.kv, AttentionParams(0.125))
    unrotated = torch.ones(len(lengths), 64), torch.zeros(len(lengths), 64)
    attention.rotate_and_store(0, torch.ones(len(lengths), 12, 64), *unrotated)
    torch.testing.assert_close(attention.attend(0, query), torch.cat(alone))


def test_decodes_of_similar_length_form_one_group_in_their_own_order() -> None:
    assert group_by_length([(150, 0), (100, 1), (160, 2)], 16) == [[0, 1, 2]]


def test_decodes_of_unlike_length_are_not_padded_to_the_longest() -> None:
    lengths = random.Random(0).sample(range(1, 4000), 60)
    groups = group_by_length([(length, i) for i, length in enumerate(lengths)], 16)
    assert sorted(i for group in groups for i in group) == list(range(60))
    for group in groups:
        blocks = [-(-lengths[i] // 16) for i in group]
        assert max(blocks) - min(blocks) <= max(4, max(blocks) // 4)


def test_no_decodes_form_no_group() -> None:
    assert group_by_length([], 16) == []


def test_a_pool_of_another_dtype_is_refused() -> None:
    pool = PagedPool(KvLayout(LAYERS, 2, 8, 64, "bfloat16"), 4)
    batch = pool.batch([Chunk(pool.open(1), 0, 1)])
    with pytest.raises(ValueError, match="float32"):
        select_kernels("cpu").prepare_attention(batch, pool.kv, AttentionParams(1.0))


def test_the_cpu_has_no_soft_cap() -> None:
    pool = PagedPool(KvLayout(LAYERS, 2, 8, 64, "float32"), 4)
    batch = pool.batch([Chunk(pool.open(1), 0, 1)])
    with pytest.raises(ValueError, match="soft cap"):
        select_kernels("cpu").prepare_attention(batch, pool.kv, AttentionParams(1.0, soft_cap=30.0))


def test_a_soft_cap_bends_the_scores_of_the_specification() -> None:
    layout = KvLayout(LAYERS, 1, 8, 64, "float32")
    pool = PagedPool(layout, 8)
    batch = pool.batch([Chunk(pool.open(21), 0, 21)])
    attention = select_kernels("reference").prepare_attention(batch, pool.kv, AttentionParams(1.0, soft_cap=2.0))
    qkv = torch.randn(21, 3, 64)
    attention.rotate_and_store(0, qkv, torch.ones(21, 64), torch.zeros(21, 64))
    query, key, value = qkv.transpose(0, 1)
    scores = 2 * torch.tanh(query @ key.T / 2)
    weights = scores.masked_fill(torch.ones(21, 21).triu(1).bool(), float("-inf")).softmax(-1)
    torch.testing.assert_close(attention.attend(0, qkv[:, :1]).squeeze(1), weights @ value)


def test_a_quantised_pool_stays_near_the_exact_one_and_padding_is_stored_nowhere() -> None:
    outputs = []
    for dtype in ("float32", "float8_e4m3fn"):
        pool = PagedPool(KvLayout(LAYERS, 2, 8, 64, dtype), 8)
        outputs.append(run(select_kernels("reference"), pool.kv, pool.batch([Chunk(pool.open(21), 0, 21)]), 4))
    # Three bits of mantissa: each value is off by at most 1/16 of itself.
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=0.25)
    assert (outputs[1] - outputs[0]).abs().mean() < 0.03

    pool = PagedPool(KvLayout(LAYERS, 2, 8, 64, "float8_e4m3fn"), 3, fill=1.0)
    before = pool.kv.raw.clone()
    batch = dataclasses.replace(pool.batch([Chunk(pool.open(1), 0, 1)]), slot_mapping=torch.tensor([PADDING_SLOT]))
    run(select_kernels("reference"), pool.kv, batch, 2)
    assert torch.equal(pool.kv.raw, before)
