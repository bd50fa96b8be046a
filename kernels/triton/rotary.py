"""Rotary position embedding (Su et al., arXiv 2104.09864) of Q and K, and the way of K and V into the pool: one pass.

Each element is read and written once. A program works on several heads of one token, so that cosines and sines, four
times as large as a head of 16 bits, are read once for all of them.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.interface import PADDING_SLOT
from kernels.kv_pool import KvPool
from kernels.triton.compile_spec import CompileSpec
from kernels.triton.interpret import INTERPRETED

_FP8_MAX = tl.constexpr(448.0)
"""Largest finite float8_e4m3fn."""
_PADDING_SLOT = tl.constexpr(PADDING_SLOT)
_ELEMENTS = 1024
"""Pairs that a program rotates: 16 heads of head_dim 128."""


@triton.jit
def _to_pool_type(x, pool_type: tl.constexpr):
    """`x` rounded to nearest, ties to even. To float8_e4m3fn the interpreter would round wrongly."""
    if INTERPRETED and pool_type == tl.float8e4nv:
        # Adding what has 2^-3 of the leading bit (subnormal: 2^-9) as its last bit drops all bits behind.
        leading = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, (127 - 6) << 23)
        large = (leading + (20 << 23)).to(tl.float32, bitcast=True) * 1.5
        x = x + large - large
    return x.to(pool_type)


@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["slot_mapping"])
def rotate_and_store(
    qkv,
    cos,
    sin,
    slot_mapping,
    blocks,
    scales,
    layer,
    token_stride,
    angle_stride,
    block_stride,
    layer_stride,
    value_stride,
    head_stride,
    scale_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED_HALF: tl.constexpr,
):
    """A program works on HEADS heads of one token; for arguments see `rotate_and_store_kv`, strides are in elements."""
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, PADDED_HALF)[None, :]
    is_dim = dims < HALF
    inside = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & is_dim
    is_rotated = (head < NUM_HEADS + NUM_KV_HEADS)[:, None]

    # A thread reads both elements of a pair and writes both, so nothing is read that was written before.
    low_pointers = qkv + token * token_stride + (head * HEAD_DIM)[:, None] + dims
    high_pointers = low_pointers + HALF
    low = tl.load(low_pointers, mask=inside, other=0.0)
    high = tl.load(high_pointers, mask=inside, other=0.0)
    angles = token * angle_stride + dims
    low_cos = tl.load(cos + angles, mask=is_dim, other=0.0).to(tl.float32)
    high_cos = tl.load(cos + angles + HALF, mask=is_dim, other=0.0).to(tl.float32)
    low_sin = tl.load(sin + angles, mask=is_dim, other=0.0).to(tl.float32)
    high_sin = tl.load(sin + angles + HALF, mask=is_dim, other=0.0).to(tl.float32)
    new_low = (low.to(tl.float32) * low_cos + high.to(tl.float32) * low_sin).to(low.dtype)
    new_high = (high.to(tl.float32) * high_cos + low.to(tl.float32) * high_sin).to(low.dtype)
    tl.store(low_pointers, new_low, mask=inside & is_rotated)
    tl.store(high_pointers, new_high, mask=inside & is_rotated)

    slot = tl.load(slot_mapping + token)
    if slot == _PADDING_SLOT:
        return
    kv_head = head - NUM_HEADS
    within = (kv_head // NUM_KV_HEADS) * value_stride + (kv_head % NUM_KV_HEADS) * head_stride
    in_layer = layer.to(tl.int64) * layer_stride + within
    is_stored = (kv_head >= 0) & (kv_head < 2 * NUM_KV_HEADS)
    low = tl.where(is_rotated, new_low, low)
    high = tl.where(is_rotated, new_high, high)
    if scales is not None:
        low = low.to(tl.float32)
        high = high.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
        # Rounded to nearest, as the specification's divisions are: the bits of a block must not depend on who wrote it.
        scale = tl.where(largest == 0, 1.0, tl.div_rn(largest, tl.full([HEADS], _FP8_MAX, tl.float32)))
        scale_pointers = scales + slot // BLOCK_SIZE * scale_stride + in_layer // HEAD_DIM + slot % BLOCK_SIZE
        tl.store(scale_pointers, scale, mask=is_stored)
        low = tl.div_rn(low, tl.broadcast_to(scale[:, None], (HEADS, PADDED_HALF)))
        high = tl.div_rn(high, tl.broadcast_to(scale[:, None], (HEADS, PADDED_HALF)))
    pool_row = blocks + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * HEAD_DIM
    pool_pointers = pool_row + in_layer[:, None] + dims
    tl.store(pool_pointers, _to_pool_type(low, blocks.dtype.element_ty), mask=is_stored[:, None] & is_dim)
    tl.store(pool_pointers + HALF, _to_pool_type(high, blocks.dtype.element_ty), mask=is_stored[:, None] & is_dim)


def rotate_and_store_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_pool: KvPool,
    layer: int,
) -> None:
    """Rotate Q and K in place, and write K and V into their slots, quantised if the pool is.

    Args:
        qkv: [tokens, num_heads + 2 * num_kv_heads, head_dim], of which the last two dimensions are contiguous.
        cos: [tokens, head_dim].
        sin: [tokens, head_dim], the first half negated; its rows are as far apart as those of `cos`.
        slot_mapping: [tokens] int64; PADDING_SLOT: not stored.
        kv_pool: the pool.
        layer: of the pool.
    """
    tokens, total_heads, head_dim = qkv.shape
    num_kv_heads, block_size = kv_pool.blocks.shape[3:5]
    padded_half = triton.next_power_of_2(head_dim // 2)
    heads = _heads_per_program(padded_half)
    rotate_and_store[tokens, triton.cdiv(total_heads, heads)](
        qkv,
        cos,
        sin,
        slot_mapping,
        kv_pool.blocks,
        kv_pool.scales,
        layer,
        qkv.stride(0),
        cos.stride(0),
        *kv_pool.blocks.stride()[:4],
        0 if kv_pool.scales is None else kv_pool.scales.stride(0),
        NUM_HEADS=total_heads - 2 * num_kv_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        HEADS=heads,
        PADDED_HALF=padded_half,
        num_warps=_num_warps(qkv.element_size()),
    )


def _heads_per_program(padded_half: int) -> int:
    return _ELEMENTS // padded_half


def _num_warps(element_bytes: int) -> int:
    """So many that each thread reads 16 bytes twice."""
    return _ELEMENTS * element_bytes // (16 * 32)


def compile_specs() -> Iterator[CompileSpec]:
    """Head sizes in the usual dtype, dtypes with the usual head size."""
    for head_dim in (64, 80, 96, 128, 256):
        yield _spec(head_dim, "bf16", "bf16")
    for activation, kv in (("fp16", "fp16"), ("fp32", "fp32"), ("bf16", "fp8e4nv"), ("fp16", "fp8e4nv")):
        yield _spec(128, activation, kv)


def _spec(head_dim: int, activation: str, kv: str) -> CompileSpec:
    pool_strides = ("block_stride", "layer_stride", "value_stride", "head_stride", "scale_stride")
    strides = ("token_stride", "angle_stride", *pool_strides)
    signature = {"qkv": f"*{activation}", "cos": "*fp32", "sin": "*fp32", "slot_mapping": "*i64", "blocks": f"*{kv}"}
    quantised = kv == "fp8e4nv"
    padded_half = triton.next_power_of_2(head_dim // 2)
    return CompileSpec(
        name=f"rotate_and_store head_dim={head_dim} {activation} kv={kv}",
        kernel=rotate_and_store,
        signature=signature | ({"scales": "*fp32"} if quantised else {}) | dict.fromkeys(("layer", *strides), "i32"),
        constants=({} if quantised else {"scales": None})
        | {
            "NUM_HEADS": 32,
            "NUM_KV_HEADS": 8,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": 16,
            "HEADS": _heads_per_program(padded_half),
            "PADDED_HALF": padded_half,
        },
        divisible_by_16=strides,
        num_warps=_num_warps(4 if activation == "fp32" else 2),
        capabilities=(90, 100) if quantised else (80, 90, 100),
        wide_loads=True,
    )
