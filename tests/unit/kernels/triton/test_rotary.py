"""The fused rotation and store against the specification, interpreted."""

from dataclasses import replace

import pytest
import torch

from kernels import reference
from kernels.interface import PADDING_SLOT, AttentionParams
from kernels.kv_layout import KvLayout
from kernels.kv_pool import KvPool
from kernels.triton.rotary import rotate_and_store_kv
from tests.paging import attention_batch

LAYER = 1
SLOTS = [40, 3, PADDING_SLOT, 17, 32, 31]


def unused_pool(layout: KvLayout) -> KvPool:
    memory = torch.randint(
        256, (6 * layout.block_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    return KvPool.over(memory, layout, 6)


def random_qkv(layout: KvLayout, num_heads: int, dtype: torch.dtype) -> torch.Tensor:
    shape = len(SLOTS), num_heads + 2 * layout.num_kv_heads, layout.head_dim
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def random_angles(head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.rand(len(SLOTS), head_dim // 2, generator=torch.Generator().manual_seed(2)) * 6
    return torch.cat((angles.cos(), angles.cos()), -1), torch.cat((-angles.sin(), angles.sin()), -1)


def expected(qkv: torch.Tensor, layout: KvLayout) -> tuple[torch.Tensor, KvPool]:
    """What the specification makes of `qkv` and of a pool."""
    qkv, pool = qkv.clone(), unused_pool(layout)
    batch = replace(attention_batch([0], [[1]], [1], [1]), slot_mapping=torch.tensor(SLOTS))
    attention = reference.prepare_attention(batch, pool, AttentionParams(1.0))
    attention.rotate_and_store(LAYER, qkv, *random_angles(layout.head_dim))
    return qkv, pool


def check(layout: KvLayout, num_heads: int, dtype: torch.dtype) -> None:
    """Every byte of the pool and every element of Q, K and V are those of the specification."""
    qkv, pool = random_qkv(layout, num_heads, dtype), unused_pool(layout)
    expected_qkv, expected_pool = expected(qkv, layout)
    rotate_and_store_kv(qkv, *random_angles(layout.head_dim), torch.tensor(SLOTS), pool, LAYER)
    assert torch.equal(qkv, expected_qkv)
    assert torch.equal(pool.raw, expected_pool.raw)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("head_dim", "num_heads"), [(16, 4), (64, 9), (80, 15), (96, 6), (128, 28), (256, 8)])
def test_k_and_v_are_stored_as_the_specification_does(head_dim: int, num_heads: int, dtype: torch.dtype) -> None:
    check(KvLayout(2, 3, 8, head_dim, str(dtype)[6:]), num_heads, dtype)


def test_bfloat16_differs_by_no_more_than_the_last_bit() -> None:
    """Which the interpreter cuts off instead of rounding."""
    layout = KvLayout(2, 3, 8, 64, "bfloat16")
    qkv, pool = random_qkv(layout, 9, torch.bfloat16), unused_pool(layout)
    expected_qkv, _ = expected(qkv, layout)
    rotate_and_store_kv(qkv, *random_angles(64), torch.tensor(SLOTS), pool, LAYER)
    torch.testing.assert_close(qkv, expected_qkv, rtol=2**-7, atol=0)
    for token, slot in enumerate(SLOTS):
        if slot != PADDING_SLOT:
            stored = pool.blocks[slot // 8, LAYER, :, :, slot % 8]
            assert torch.equal(stored, qkv[token, 9:].unflatten(0, (2, 3)))


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_quantised_k_and_v_have_the_bits_of_the_specification(dtype: torch.dtype, head_dim: int) -> None:
    check(KvLayout(2, 3, 16, head_dim, "float8_e4m3fn"), 6, dtype)


def test_a_head_of_zeros_has_the_scale_one() -> None:
    layout = KvLayout(2, 1, 8, 64, "float8_e4m3fn")
    pool = unused_pool(layout)
    rotate_and_store_kv(torch.zeros(6, 4, 64), *random_angles(64), torch.tensor(SLOTS), pool, LAYER)
    assert pool.scales is not None
    assert (pool.scales[0, LAYER, :, :, 3] == 1).all()
    assert not pool.blocks[0, LAYER, :, :, 3].float().any()


def test_rows_may_lie_apart() -> None:
    layout = KvLayout(2, 2, 8, 64, "float32")
    wide = torch.full((len(SLOTS), 1000), float("nan"))
    qkv = wide[:, 8 : 8 + 7 * 64].unflatten(1, (7, 64))
    qkv.copy_(random_qkv(layout, 3, torch.float32))
    expected_qkv, expected_pool = expected(qkv, layout)
    pool = unused_pool(layout)
    rotate_and_store_kv(qkv, *random_angles(64), torch.tensor(SLOTS), pool, LAYER)
    assert torch.equal(qkv, expected_qkv)
    assert torch.equal(pool.raw, expected_pool.raw)
    assert wide[:, :8].isnan().all()
    assert wide[:, 8 + 7 * 64 :].isnan().all()
