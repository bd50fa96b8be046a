"""Into how many programs the attention of a batch's decodes is divided: a pure function of shapes and upper bounds."""

from dataclasses import dataclass

from kernels.triton.tuning import DECODE, SHARED_PREFIX, Tiling, find_tiling

LEAST_PIECE = 256
"""Tokens. With head_dim 128 in 16 bits a piece of 256 is 128 KiB of K and V. The 400 programs that an H200 holds read
that in about 12 us, of which the way to a program's first tile takes about 2. Shorter contexts stay whole, and need
no second kernel."""

PIECES_PER_SEQUENCE = 4
"""So many pieces a sequence on average even out unlike lengths."""

MOST_WAVES = 4
"""More programs than so many times what the device holds even out nothing more."""


@dataclass(frozen=True)
class Device:
    """What a plan must know of a device."""

    capability: int
    """Compute capability: 90 is 9.0."""
    multiprocessors: int


@dataclass(frozen=True)
class DecodeShape:
    """The dimensions of a batch of decodes. Everything is known to the host and the same when a graph is replayed."""

    num_sequences: int
    longest: int
    """Upper bound of the tokens that a sequence attends to."""
    num_kv_heads: int
    group: int
    """Query heads that share a KV head."""
    head_dim: int
    element_bytes: int
    """See `tuning.Table`."""
    has_shared_prefix: bool


@dataclass(frozen=True)
class DecodePlan:
    """How the kernels are launched."""

    tiling: Tiling
    spare: int
    """Pieces that sequences may be cut into beyond one each; 0: nothing is cut and nothing merged."""
    least_piece: int
    """Tokens."""
    shared_tiling: Tiling
    shares: int
    """Pieces that the shared prefix may be cut into; 0: no one has looked for one."""


def plan_decodes(shape: DecodeShape, device: Device, least_piece: int = LEAST_PIECE) -> DecodePlan:
    """Choose tiles, and numbers of pieces that fill the device.

    Raises:
        ValueError: head_dim is not a multiple of 16, or more than 256.
    """
    tiling = find_tiling(DECODE, device.capability, shape.head_dim, shape.element_bytes)
    shared_tiling = find_tiling(SHARED_PREFIX, device.capability, shape.head_dim, shape.element_bytes)
    spare = shares = 0
    if shape.longest > least_piece:
        most = shape.num_sequences * (shape.longest // least_piece)
        spare = min(_wanted_pieces(shape, tiling.resident * device.multiprocessors), most)
    if shape.has_shared_prefix:
        spare = max(spare, 1)
        row_tiles = -(-shape.num_sequences * shape.group // shared_tiling.rows)
        programs = shape.num_kv_heads * row_tiles
        fill = -(-shared_tiling.resident * device.multiprocessors // programs)
        shares = max(1, min(fill, shape.longest // least_piece))
    return DecodePlan(tiling, spare, least_piece, shared_tiling, shares)


def _wanted_pieces(shape: DecodeShape, resident: int) -> int:
    wave = -(-resident // shape.num_kv_heads)
    return min(max(wave, PIECES_PER_SEQUENCE * shape.num_sequences), MOST_WAVES * wave)
