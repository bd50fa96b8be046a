"""Toy kernels for the test of the compile check: one that passes, and one for each thing that can be wrong."""

from collections.abc import Iterator
from dataclasses import replace

import triton
import triton.language as tl

from kernels.triton.compile_spec import CompileSpec


@triton.jit
def _add_rows(x, y, out, row_stride, columns: tl.constexpr) -> None:  # noqa: ANN001 - arguments of a kernel
    row = tl.program_id(0).to(tl.int64) * row_stride
    column = tl.arange(0, columns)
    tl.store(out + row + column, tl.load(x + row + column) + tl.load(y + row + column))


@triton.jit
def _product(x, y, out, size: tl.constexpr, inner: tl.constexpr) -> None:  # noqa: ANN001 - arguments of a kernel
    outer, between = tl.arange(0, size), tl.arange(0, inner)
    left = tl.load(x + outer[:, None] * inner + between[None, :])
    right = tl.load(y + between[:, None] * size + outer[None, :])
    tl.store(out + outer[:, None] * size + outer[None, :], tl.dot(left, right))


@triton.jit
def _hold_rows(x, out, rows: tl.constexpr, columns: tl.constexpr) -> None:  # noqa: ANN001 - arguments of a kernel
    row, column = tl.arange(0, rows)[:, None], tl.arange(0, columns)[None, :]
    tile = tl.load(x + row * columns + column).to(tl.float32)
    # The sum over all needs every element before the first is stored.
    tl.store(out + row * columns + column, tile / tl.sum(tl.sum(tile, 1), 0))


def compile_specs() -> Iterator[CompileSpec]:
    add = CompileSpec(
        name="add aligned",
        kernel=_add_rows,
        signature={"x": "*bf16", "y": "*bf16", "out": "*bf16", "row_stride": "i64"},
        constants={"columns": 1024},
        divisible_by_16=("row_stride",),
        wide_loads=True,
        min_ctas=2,
    )
    yield add
    yield replace(add, name="add unaligned", divisible_by_16=(), capabilities=(90,))
    yield replace(add, name="add tiny", constants={"columns": 256}, capabilities=(90,))
    yield replace(add, name="add incomplete", constants={}, capabilities=(90,))
    yield replace(add, name="add broken", constants={"columns": 1000}, capabilities=(90,))
    yield replace(add, name="add crowded", min_ctas=17, capabilities=(90,))
    yield replace(add, name="add without matrix", matrix=True, capabilities=(90,))
    product = CompileSpec(
        name="product",
        kernel=_product,
        signature={"x": "*bf16", "y": "*bf16", "out": "*fp32"},
        constants={"size": 64, "inner": 64},
        wide_loads=True,
        matrix=True,
    )
    yield product
    yield replace(product, name="product too large", constants={"size": 32, "inner": 2048}, capabilities=(80,))
    yield CompileSpec(
        name="hold spills",
        kernel=_hold_rows,
        signature={"x": "*bf16", "out": "*bf16"},
        constants={"rows": 128, "columns": 256},
        capabilities=(90,),
    )
