"""Tile sizes of prefill attention by capability and shape, checked in like those of `kernels.triton.tuning`.

What counts in prefill is products for each byte that comes from the L2 cache: a tile of K and V is used once for each
row of the query tile, so with R rows and 16 bits it is R operations a byte. If the L2 of an H200 gives 6 TB/s, 64 rows
stay below half of the 790 TFLOP/s of its matrix units, and 128 rows just reach them. For 128 rows of head_dim 128 each
thread of 8 warps needs 64 registers for sums, 32 for scores and 16 for weights, so one program fills a
multiprocessor; with head_dim 64 two do. Tiles of 128 tokens would take 254 registers there, and spill on sm_80.
"""

from kernels.triton.tuning import Table, Tiling, find_tiling

# With head_dim 256, 128 rows spill on sm_80: its matrix instructions take queries, K and V from registers too.
_LONG_80 = {
    (64, 2): Tiling(64, 8, 3, 1, 128),
    (128, 2): Tiling(64, 8, 3, 1, 128),
    (256, 2): Tiling(32, 8, 2, 1, 64),
    # Exact products of float32 do not run on matrix units, and the compiler keeps whole operands in registers: tiles
    # of 32 rows by 32 tokens spill already.
    (64, 4): Tiling(16, 4, 2, 3, 32),
    (128, 4): Tiling(16, 4, 2, 3, 16),
    (256, 4): Tiling(16, 4, 2, 3, 16),
}
_LONG_90 = {
    **_LONG_80,
    (256, 2): Tiling(32, 8, 2, 1, 128),
    (64, 1): Tiling(64, 8, 3, 1, 128),
    (128, 1): Tiling(64, 8, 3, 1, 128),
    (256, 1): Tiling(32, 8, 2, 1, 128),
}
LONG: Table = {80: _LONG_80, 90: _LONG_90}
"""For chunks of many rows."""

_SHORT_ROWS = 64
_SHORT_80 = {
    **_LONG_80,
    (64, 2): Tiling(64, 4, 3, 2, _SHORT_ROWS),
    (128, 2): Tiling(64, 4, 2, 2, _SHORT_ROWS),
}
_SHORT_90 = {
    **_SHORT_80,
    (64, 1): Tiling(64, 4, 3, 3, _SHORT_ROWS),
    (128, 1): Tiling(64, 4, 2, 2, _SHORT_ROWS),
    (256, 1): Tiling(32, 8, 2, 1, _SHORT_ROWS),
}
SHORT: Table = {80: _SHORT_80, 90: _SHORT_90}
"""For chunks that half a tile holds: sequences opened again, whose context is cached but for a block. Then K and V of
long contexts are read for few rows, and two or more programs a multiprocessor hide more of the latency."""


def choose_prefill_tiling(capability: int, head_dim: int, element_bytes: int, rows_per_sequence: int) -> Tiling:
    """The tiling for chunks that have so many rows, tokens times query heads of a KV head, on average.

    Raises:
        ValueError: head_dim is not a multiple of 16, or more than 256.
    """
    return find_tiling(SHORT if rows_per_sequence <= _SHORT_ROWS else LONG, capability, head_dim, element_bytes)
