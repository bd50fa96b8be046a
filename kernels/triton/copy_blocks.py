"""Copying blocks inside the pool: all copies of a step in one launch."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.kv_pool import KvPool
from kernels.triton.compile_spec import CompileSpec

_UNIT = 16
"""Bytes that a thread moves at once. Every block is a multiple: its K and V are 2 * block_size tokens of something."""
_TILE = 1024
"""Units a program: eight for each of 128 threads, all of them under way before the first is written."""


@triton.jit
def _copy_blocks(words, copies, units, stride_units, TILE: tl.constexpr):
    copy = copies + tl.program_id(0) * 2
    source = tl.load(copy) * stride_units * 4
    destination = tl.load(copy + 1) * stride_units * 4
    word = tl.program_id(1) * (TILE * 4) + tl.arange(0, TILE * 4)
    inside = word < units * 4
    tl.store(words + destination + word, tl.load(words + source + word, mask=inside), mask=inside)


def copy_blocks(kv_pool: KvPool, copies: torch.Tensor) -> None:
    """Copy whole blocks, `copies [n, 2]` int64 of (source, destination); a block is one contiguous range."""
    if not len(copies):
        return
    words = kv_pool.raw.view(torch.int32)
    units = kv_pool.raw.shape[1] // _UNIT
    grid = (len(copies), triton.cdiv(units, _TILE))
    _copy_blocks[grid](words, copies, units, kv_pool.raw.stride(0) // _UNIT, TILE=_TILE, num_warps=4)


def compile_specs() -> Iterator[CompileSpec]:
    """One: bytes have no type."""
    yield CompileSpec(
        name="copy_blocks",
        kernel=_copy_blocks,
        signature={"words": "*i32", "copies": "*i64", "units": "i32", "stride_units": "i32"},
        constants={"TILE": _TILE},
        num_warps=4,
        wide_loads=True,
        min_ctas=8,
    )
