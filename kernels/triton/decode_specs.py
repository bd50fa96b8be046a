"""What the kernels of decode attention ship as."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import triton

from kernels.triton.compile_spec import CAPABILITIES, CompileSpec
from kernels.triton.decode_attention import decode_attention
from kernels.triton.decode_plan import LEAST_PIECE
from kernels.triton.merge_partials import merge_partials, parts_at_once
from kernels.triton.shared_prefix import attend_shared_prefix
from kernels.triton.tuning import DECODE, SHARED_PREFIX, Table, Tiling, find_tiling, padded_dim

_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "e4m3": 1}
_HEAD_DIMS = (64, 80, 96, 128, 256)
_NUM_KV_HEADS = 8
_STRIDES = ("out_stride", "query_stride", "block_stride", "scale_stride")
"""Multiples of 16 elements in every pool; other integers are of any value."""


@dataclass(frozen=True, kw_only=True)
class _Variant:
    """What a kernel is compiled for; the defaults are the most common."""

    kv: str = "bf16"
    query: str = "bf16"
    head_dim: int = 128
    block_size: int = 16
    group: int = 4
    splits: bool = True
    shared: bool = False
    window: bool = False
    cap: bool = False
    slots: int = 16

    @property
    def label(self) -> str:
        """What sets it apart."""
        kv = self.kv if self.kv == self.query else f"{self.kv} query={self.query}"
        flags = [flag for flag in ("splits", "shared", "window", "cap") if getattr(self, flag)]
        slots = [f"slots={self.slots}"] if self.slots > 16 else []
        return " ".join([f"head_dim={self.head_dim} {kv} block={self.block_size} group={self.group}", *flags, *slots])

    @property
    def element_bytes(self) -> int:
        """As in `tuning.Table`."""
        return 4 if self.query == "fp32" else _BYTES[self.kv]

    @property
    def types(self) -> dict[str, str]:
        """Types of all arguments that any of the kernels has."""
        pointers = {"out": self.query, "query": self.query, "blocks": "i16" if self.kv == "e4m3" else self.kv}
        pointers |= dict.fromkeys(("partials", "log_sums", "scales"), "fp32")
        pointers |= dict.fromkeys(("block_tables", "block_table", "context_ends", "shared_blocks"), "i64")
        return {name: f"*{kind}" for name, kind in pointers.items()} | {"factor": "fp32", "cap": "fp32"}

    @property
    def absent(self) -> set[str]:
        """Arguments that are None."""
        absent = set() if self.splits else {"partials", "log_sums"}
        needs = {"scales": self.kv == "e4m3", "shared_blocks": self.shared, "sliding_window": self.window}
        return absent | {name for name, needed in (needs | {"cap": self.cap}).items() if not needed}

    def constants(self, tiling: Tiling) -> dict[str, Any]:
        """Values of all `tl.constexpr` that any of the kernels has."""
        shared_tiling = find_tiling(SHARED_PREFIX, 90, self.head_dim, self.element_bytes)
        padded_group = triton.next_power_of_2(self.group)
        return {
            "GROUP": self.group,
            "PADDED_GROUP": padded_group,
            "ROWS": max(tiling.rows, padded_group),
            "NUM_KV_HEADS": _NUM_KV_HEADS,
            "HEAD_DIM": self.head_dim,
            "PADDED_DIM": padded_dim(self.head_dim),
            "BLOCK_SIZE": self.block_size,
            "TILE": tiling.tile,
            "SHARED_TILE": shared_tiling.tile,
            "LEAST": LEAST_PIECE,
            "SLOTS": self.slots,
            "PARTS": parts_at_once(padded_group, self.head_dim),
        }


def compile_specs() -> Iterator[CompileSpec]:
    """Every tiling, and everything that is compiled into a kernel with the most common one."""
    yield from _streaming("decode_attention", decode_attention, DECODE, _decode_variants())
    yield from _streaming("decode_shared_prefix", attend_shared_prefix, SHARED_PREFIX, _shared_variants())
    for variant in _merge_variants():
        tiling = find_tiling(DECODE, 90, variant.head_dim, variant.element_bytes)
        yield _spec("decode_merge", merge_partials, variant, replace(tiling, num_warps=4, num_stages=3), CAPABILITIES)


def _tilings() -> Iterator[_Variant]:
    for head_dim in _HEAD_DIMS:
        yield _Variant(head_dim=head_dim)
    for head_dim in (64, 128, 256):  # 80 and 96 are padded to 128
        yield _Variant(head_dim=head_dim, kv="fp32", query="fp32")
        yield _Variant(head_dim=head_dim, kv="e4m3")


def _decode_variants() -> Iterator[_Variant]:
    yield from _tilings()
    yield _Variant(kv="fp16", query="fp16")
    yield _Variant(kv="e4m3", query="fp16")
    yield _Variant(kv="e4m3", query="fp32")
    yield from (_Variant(block_size=block_size) for block_size in (8, 32, 64, 128))
    yield from (_Variant(group=group) for group in (1, 8, 32))
    yield _Variant(slots=1024)
    for kv in ("bf16", "e4m3"):
        yield _Variant(kv=kv, splits=False)
        yield _Variant(kv=kv, shared=True)
        yield _Variant(kv=kv, window=True)
        yield _Variant(kv=kv, cap=True)
        yield _Variant(kv=kv, window=True, cap=True, splits=False)
    yield _Variant(head_dim=256, window=True, cap=True)


def _shared_variants() -> Iterator[_Variant]:
    for variant in _tilings():
        yield replace(variant, shared=True)
    for kv in ("bf16", "e4m3"):
        yield _Variant(kv=kv, shared=True, cap=True)
        yield _Variant(kv=kv, shared=True, block_size=128)


def _merge_variants() -> Iterator[_Variant]:
    for head_dim in _HEAD_DIMS:
        yield _Variant(head_dim=head_dim)
    yield _Variant(query="fp32", kv="fp32")
    yield _Variant(shared=True)
    yield _Variant(window=True)
    yield from (_Variant(group=group) for group in (1, 5, 8))
    yield _Variant(slots=1024, shared=True)


def _streaming(name: str, kernel: Any, table: Table, variants: Iterator[_Variant]) -> Iterator[CompileSpec]:  # noqa: ANN401 - triton is untyped
    """Specs of a kernel that reads K and V: one for each tiling, with the capabilities that share it."""
    for variant in variants:
        shared_by: dict[Tiling, list[int]] = {}
        for capability in CAPABILITIES:
            tiling = find_tiling(table, capability, variant.head_dim, variant.element_bytes)
            shared_by.setdefault(replace(tiling, resident=0), []).append(capability)
        for tiling, capabilities in shared_by.items():
            spec = _spec(name, kernel, variant, tiling, tuple(capabilities))
            yield replace(
                spec,
                name=f"{spec.name} tile={tiling.tile}",
                # The lengths of 1024 sequences are the one other tile that is large; they are read in 8 bytes.
                wide_loads=variant.slots < 1024,
                matrix=variant.query != "fp32",
                min_ctas=2 if name == "decode_attention" and variant.query != "fp32" else 1,
            )


def _spec(
    name: str,
    kernel: Any,  # noqa: ANN401 - triton is untyped
    variant: _Variant,
    tiling: Tiling,
    capabilities: tuple[int, ...],
) -> CompileSpec:
    names: list[str] = kernel.arg_names
    constants = variant.constants(tiling) | dict.fromkeys(variant.absent)
    types = variant.types
    return CompileSpec(
        name=f"{name} {variant.label}",
        kernel=kernel,
        signature={name: types.get(name, "i32") for name in names if name not in constants},
        constants={name: constants[name] for name in names if name in constants},
        divisible_by_16=tuple(name for name in names if name in _STRIDES),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        capabilities=capabilities,
    )
