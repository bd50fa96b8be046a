"""Tile sizes by capability and shape, checked in: nothing is searched while serving.

They follow from figures of `make gpu-compile`: registers, shared memory, and so how many programs a multiprocessor
holds. What counts in decoding is bytes under way: a multiprocessor of an H200 draws 36 GB/s of 4.8 TB/s; at a
latency of 1 us that is 36 KB.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Tiling:
    """How one kernel is launched."""

    tile: int
    """Tokens of context read at once."""
    num_warps: int
    num_stages: int
    resident: int
    """Programs that a multiprocessor holds at once."""
    rows: int = 16
    """Query rows of a tile; matrix instructions have 16."""


Table = Mapping[int, Mapping[tuple[int, int], Tiling]]
"""Compute capability to (head_dim padded to a power of two, bytes of an element) to tiling.

Elements are those of K and V, but 4 bytes wherever queries are float32: those products know no tensor cores.
"""

_FLOAT32 = {(64, 4): Tiling(32, 4, 2, 4), (128, 4): Tiling(16, 4, 2, 4), (256, 4): Tiling(16, 4, 2, 2)}

# Figures of sm_90 by triton 3.9 (3.6 in brackets). head_dim 128 in 16 bits: 80 to 108 registers (92 to 148), 70 KiB of
# shared memory, so three programs; two tiles of K and V each, one in use and one of 32 KiB under way. A tile takes 349
# instructions a warp (340), 44 for each KiB: at 4.8 TB/s a quarter of what a multiprocessor can issue. Half the tile
# and six programs have as many bytes under way for a third more instructions, most of them reductions and barriers.
# Two warps take 189 registers, and leave half as many warps to hide latency; one warp spills. With K and V as
# the left operand, so that 8 rows would do, a tile takes no fewer instructions, and 101 KiB. Words of two e4m3
# elements: 122 to 128 registers (152), 39 KiB, 137 instructions for each KiB (151): three quarters of the issue slots.
_DECODE_90 = _FLOAT32 | {
    (64, 2): Tiling(128, 4, 3, 3),
    (128, 2): Tiling(64, 4, 3, 3),
    (256, 2): Tiling(32, 4, 3, 3),
    (64, 1): Tiling(128, 4, 3, 3),
    (128, 1): Tiling(64, 4, 3, 3),
    (256, 1): Tiling(32, 4, 3, 3),
}

DECODE: Table = {
    # 164 KiB of shared memory hold two programs of 70 KiB.
    80: {shape: replace(tiling, resident=2) for shape, tiling in _DECODE_90.items()},
    90: _DECODE_90,
    100: _DECODE_90,
}

# 64 rows make wgmma and tcgen05 instructions possible; reading K and V is the lesser part.
_SHARED_PREFIX_90 = {
    (64, 2): Tiling(64, 4, 3, 2, rows=64),
    (128, 2): Tiling(64, 4, 3, 2, rows=64),
    (256, 2): Tiling(32, 8, 2, 1, rows=64),
    (64, 1): Tiling(64, 4, 3, 2, rows=64),
    (128, 1): Tiling(32, 4, 3, 2, rows=64),
    (256, 1): Tiling(32, 8, 2, 1, rows=64),
    **_FLOAT32,
}

SHARED_PREFIX: Table = {
    # Without wgmma K and V go through registers, too: tiles of 64 would take 246 of 255.
    80: _SHARED_PREFIX_90 | {(128, 2): Tiling(32, 4, 3, 2, rows=64), (128, 1): Tiling(32, 8, 2, 1, rows=64)},
    90: _SHARED_PREFIX_90,
    100: _SHARED_PREFIX_90,
}


def padded_dim(head_dim: int) -> int:
    """The power of two from 64 that `head_dim` is padded to in tiles, by masked loads.

    Raises:
        ValueError: head_dim is not a multiple of 16, or more than 256.
    """
    if head_dim % 16 or not 0 < head_dim <= 256:
        raise ValueError(f"kernels 'triton' need a head_dim that is a multiple of 16 up to 256, not {head_dim}")
    return max(64, 1 << (head_dim - 1).bit_length())


def find_tiling(table: Table, capability: int, head_dim: int, element_bytes: int) -> Tiling:
    """The tiling for a device: that of the newest capability in the table that is not newer.

    Raises:
        ValueError: see `padded_dim`.
    """
    newest = max((known for known in table if known <= capability), default=min(table))
    return table[newest][padded_dim(head_dim), element_bytes]
