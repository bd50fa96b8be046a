"""Root mean square normalisation: one pass over memory, in float32 arithmetic."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.triton.compile_spec import CompileSpec

_LARGEST_ROW = 16384
"""A row lies in registers: 32 elements for each of 512 threads at most."""
_LEAST_TILE = 1024
"""Short rows, heads that is, are normalised several at once, so that a program has something to do."""


@triton.jit
def _normalized(x, weight, size, epsilon):
    return x * tl.rsqrt(tl.sum(x * x, 1) / size + epsilon)[:, None] * weight


@triton.jit
def _rms_norm(out, x, weight, epsilon, rows, size, token_stride, weight_stride, ROWS: tl.constexpr, TILE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, TILE)[None, :]
    inside = (row < rows) & (column < size)
    values = tl.load(x + token * token_stride + row * size + column, mask=inside, other=0).to(tl.float32)
    weights = tl.load(weight + row * weight_stride + column, mask=inside, other=0).to(tl.float32)
    normalized = _normalized(values, weights, size, epsilon)
    tl.store(out + (token * rows + row) * size + column, normalized.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_rms_norm(out, x, residual, weight, epsilon, size, TILE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)[None, :]
    inside = column < size
    offsets = token * size + column
    added = tl.load(x + offsets, mask=inside, other=0).to(tl.float32)
    total = tl.load(residual + offsets, mask=inside, other=0).to(tl.float32) + added
    total = total.to(residual.dtype.element_ty)
    tl.store(residual + offsets, total, mask=inside)
    weights = tl.load(weight + column, mask=inside, other=0).to(tl.float32)
    # The norm is of what the residual now holds, rounded as that is.
    normalized = _normalized(total.to(tl.float32), weights, size, epsilon)
    tl.store(out + offsets, normalized.to(out.dtype.element_ty), mask=inside)


def _columns(size: int) -> int:
    if size > _LARGEST_ROW:
        raise ValueError(f"rms_norm: rows of {size} elements are too long; {_LARGEST_ROW} is the most")
    columns: int = triton.next_power_of_2(size)
    return columns


def _num_warps(elements: int) -> int:
    """Of a program with a tile of so many elements: at least 8 for each thread."""
    return min(max(elements // 256, 1), 16)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """`x / sqrt(mean(x²) + epsilon) * weight` over the last dimension, of at most 16,384 elements.

    Args:
        x: [tokens, size] or [tokens, heads, size]; the heads may be some of more.
        weight: [size], or [heads, size].
        epsilon: added to the mean.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    tokens, size = len(x), x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    columns = _columns(size)
    rows = max(_LEAST_TILE // columns, 1) if heads > 1 else 1
    if tokens:
        _rms_norm[tokens, triton.cdiv(heads, rows)](
            out,
            x,
            weight,
            epsilon,
            heads,
            size,
            x.stride(0),
            size if weight.dim() == 2 else 0,
            ROWS=rows,
            TILE=columns,
            num_warps=_num_warps(rows * columns),
        )
    return out


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Add `x` to `residual` in place; the norm of the sum, all `[tokens, hidden_size]` and contiguous."""
    out = torch.empty_like(residual)
    tokens, size = x.shape
    columns = _columns(size)
    if tokens:
        _add_rms_norm[tokens,](out, x, residual, weight, epsilon, size, TILE=columns, num_warps=_num_warps(columns))
    return out


def compile_specs() -> Iterator[CompileSpec]:
    """Rows from the narrowest head to the longest row; bf16 everywhere, other types where registers are scarce."""
    for columns in (64, 128, 256):
        yield _head_spec(columns, "bf16")
    for columns in (1024, 2048, 4096, 8192, _LARGEST_ROW):
        yield _row_spec(columns, "bf16")
    for dtype in ("fp16", "fp32"):
        yield _head_spec(128, dtype)
        yield _row_spec(_LARGEST_ROW, dtype)


def _head_spec(columns: int, dtype: str) -> CompileSpec:
    integers = dict.fromkeys(("rows", "size", "token_stride", "weight_stride"), "i32")
    return CompileSpec(
        name=f"rms_norm tile={columns} {dtype}",
        kernel=_rms_norm,
        signature={"out": f"*{dtype}", "x": f"*{dtype}", "weight": f"*{dtype}", "epsilon": "fp32"} | integers,
        constants={"ROWS": _LEAST_TILE // columns, "TILE": columns},
        divisible_by_16=("size", "token_stride", "weight_stride"),
        num_warps=_num_warps(_LEAST_TILE),
        wide_loads=True,
        min_ctas=8,
    )


def _row_spec(columns: int, dtype: str) -> CompileSpec:
    tensors = dict.fromkeys(("out", "x", "residual", "weight"), f"*{dtype}")
    num_warps = _num_warps(columns)
    return CompileSpec(
        name=f"add_rms_norm tile={columns} {dtype}",
        kernel=_add_rms_norm,
        signature=tensors | {"epsilon": "fp32", "size": "i32"},
        constants={"TILE": columns},
        divisible_by_16=("size",),
        num_warps=num_warps,
        wide_loads=True,
        min_ctas=1 if columns == _LARGEST_ROW else 2,
    )
