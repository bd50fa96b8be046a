"""The gated activation of the feed-forward layer: one pass, in float32 arithmetic."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.triton.compile_spec import CompileSpec

_TILE = 1024
"""Elements a program: 8 for each of 128 threads, so that 16-bit types are read 16 bytes at a time."""


@triton.jit
def _silu_mul(out, gate_up, size, token_stride, TILE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < size
    row = gate_up + token * token_stride
    gate = tl.load(row + column, mask=inside).to(tl.float32)
    up = tl.load(row + size + column, mask=inside).to(tl.float32)
    product = gate / (1 + tl.exp(-gate)) * up
    tl.store(out + token * size + column, product.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of `gate_up [tokens, 2 * size]`, gate first."""
    tokens, width = gate_up.shape
    size = width // 2
    out = gate_up.new_empty(tokens, size)
    if tokens:
        _silu_mul[tokens, triton.cdiv(size, _TILE)](out, gate_up, size, gate_up.stride(0), TILE=_TILE, num_warps=4)
    return out


def compile_specs() -> Iterator[CompileSpec]:
    """One for each type of activations."""
    for dtype in ("bf16", "fp16", "fp32"):
        yield CompileSpec(
            name=f"silu_mul {dtype}",
            kernel=_silu_mul,
            signature={"out": f"*{dtype}", "gate_up": f"*{dtype}", "size": "i32", "token_stride": "i32"},
            constants={"TILE": _TILE},
            divisible_by_16=("size", "token_stride"),
            num_warps=4,
            wide_loads=True,
            min_ctas=8,
        )
