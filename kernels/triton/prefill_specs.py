"""What prefill attention ships as."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from kernels.triton.compile_spec import CAPABILITIES, CompileSpec
from kernels.triton.prefill_attention import prefill_attention
from kernels.triton.prefill_tuning import LONG, SHORT
from kernels.triton.tuning import find_tiling, padded_dim

_ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8e4nv": 1}
_FP8_CAPABILITIES = (90, 100)
_POINTERS = {"block_tables": "*i64", "query_starts": "*i64", "context_ends": "*i64"}
_COUNTS = ("layer", "num_decodes", "num_sequences", "table_stride")
_STRIDES = ("out_stride", "query_stride", "block_stride", "layer_stride", "value_stride", "head_stride", "scale_stride")


@dataclass(frozen=True)
class _Variant:
    """What is compiled into the kernel."""

    head_dim: int = 128
    kv: str = "bf16"
    chunks: str = "long"
    features: str = ""
    """Of "window" and "cap"."""
    group: int = 4
    block_size: int = 16

    @property
    def name(self) -> str:
        return (
            f"prefill_attention head_dim={self.head_dim} {self.kv} block={self.block_size} group={self.group} "
            f"{self.chunks} {self.features}"
        ).rstrip()


def compile_specs() -> Iterator[CompileSpec]:
    """Every tiling with the usual model; what is rarer with those that are used most."""
    variants = [
        *(_Variant(*choice) for choice in product((64, 128, 256), ("bf16", "fp8e4nv"), ("long", "short"))),
        *(_Variant(*choice, features="window cap") for choice in product((64, 128, 256), ("bf16", "fp8e4nv"))),
        *(_Variant(head_dim, "fp32", features="window cap") for head_dim in (64, 128, 256)),
        *(_Variant(head_dim) for head_dim in (80, 96)),
        *(_Variant(head_dim, "fp16") for head_dim in (64, 128)),
        _Variant(chunks="short", features="window cap"),
        _Variant(features="window", group=7, block_size=8),
        _Variant(group=3, block_size=128),
    ]
    for variant in variants:
        yield from _specs(variant)


def _specs(variant: _Variant) -> Iterator[CompileSpec]:
    """One entry for each tiling; capabilities that share one share an entry."""
    capabilities = _FP8_CAPABILITIES if variant.kv == "fp8e4nv" else CAPABILITIES
    table = LONG if variant.chunks == "long" else SHORT
    key = variant.head_dim, _ELEMENT_BYTES[variant.kv]
    tilings = {capability: find_tiling(table, capability, *key) for capability in capabilities}
    for tiling in dict.fromkeys(tilings.values()):
        activation = "bf16" if variant.kv == "fp8e4nv" else variant.kv
        signature = {"out": f"*{activation}", "query": f"*{activation}", "blocks": f"*{variant.kv}", **_POINTERS}
        signature |= dict.fromkeys((*_COUNTS, *_STRIDES), "i32") | {"factor": "fp32"}
        optional = {
            "scales": "*fp32" if variant.kv == "fp8e4nv" else None,
            "cap": "fp32" if "cap" in variant.features else None,
            "sliding_window": "i32" if "window" in variant.features else None,
        }
        constants: dict[str, Any] = {name: None for name, kind in optional.items() if kind is None}
        shares = [capability for capability in capabilities if tilings[capability] == tiling]
        yield CompileSpec(
            name=f"{variant.name} rows={tiling.rows}",
            kernel=prefill_attention,
            signature=signature | {name: kind for name, kind in optional.items() if kind is not None},
            constants=constants
            | {
                "GROUP": variant.group,
                "HEAD_DIM": variant.head_dim,
                "PADDED_DIM": padded_dim(variant.head_dim),
                "BLOCK_SIZE": variant.block_size,
                "ROWS": tiling.rows,
                "TILE": tiling.tile,
            },
            divisible_by_16=_STRIDES,
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
            capabilities=tuple(shares),
            wide_loads=True,
            # Exact products of float32 do not run on matrix units.
            matrix=variant.kv != "fp32",
            min_ctas=tiling.resident,
        )
