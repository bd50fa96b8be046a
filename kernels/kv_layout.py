"""The layout of the KV pool: the only definition, for manager, runner and kernels alike.

The pool is `num_blocks` blocks in a row. A block is one contiguous byte range that holds K and V of `block_size`
tokens for all layers, `[num_layers, 2, num_kv_heads, block_size, head_dim]` with K at index 0 and V at 1, so that
copy-on-write, off-load and transfer are one copy each. Block `b` starts at byte `b * block_bytes`; slot `s` is token
`s % block_size` of block `s // block_size`. Offsets are 64-bit everywhere.

A quantised block is followed, inside its byte range, by its scales: one float32 for each token and head,
`[num_layers, 2, num_kv_heads, block_size]`. A stored value is `quantised * scale`, so a block's bytes depend on its
tokens alone.
"""

import math
from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
QUANTISED = frozenset({"float8_e4m3fn"})
SCALE_BYTES = 4

NULL_BLOCK = 0
"""Pads block tables; in no state and never granted."""


@dataclass(frozen=True)
class KvLayout:
    """Shape of one block.

    Raises:
        ValueError: a dimension is not positive, block_size is not a power of two in 8..128, or dtype is unknown; the
            message begins with the field's name.
    """

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if not 8 <= self.block_size <= 128 or self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size must be a power of two from 8 to 128, not {self.block_size}")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, not {self.dtype!r}")

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """`(num_layers, 2, num_kv_heads, block_size, head_dim)`."""
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def scale_shape(self) -> tuple[int, int, int, int] | None:
        """`(num_layers, 2, num_kv_heads, block_size)` of a quantised block, else None."""
        return self.block_shape[:4] if self.dtype in QUANTISED else None

    @property
    def data_bytes(self) -> int:
        """Bytes of a block's K and V; what follows are its scales."""
        return math.prod(self.block_shape) * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.data_bytes + (SCALE_BYTES * math.prod(self.scale_shape) if self.scale_shape else 0)

    def num_blocks(self, pool_bytes: int) -> int:
        """How many whole blocks, the null block included, fit into a pool of `pool_bytes`."""
        return pool_bytes // self.block_bytes

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)
