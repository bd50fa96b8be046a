"""How the contexts of a batch are divided among programs: into pieces of equal length, on the device.

A captured graph is replayed with other lengths than it was captured with, so the host fixes no more than how many
programs there are. From the lengths themselves each program derives the same division: sequences are cut into pieces
of one length, chosen so that at most `spare` pieces come on top of one for each sequence. However unlike the lengths
are, no program has more to do than one piece, and there are never many with nothing to do.
"""

import triton
import triton.language as tl


def count_slots(num_sequences: int) -> int:
    """Size of a vector with a place for each sequence: one of few, since a kernel is compiled for each."""
    slots = 16
    while slots < num_sequences:
        slots *= 4
    return slots


@triton.jit
def first_token(context_end, shared_tokens, sliding_window, ALIGNMENT: tl.constexpr):
    """Where reading begins: after the shared prefix, or with the last multiple of ALIGNMENT that the window shows."""
    first = shared_tokens
    if sliding_window is not None:
        first = tl.maximum(context_end - sliding_window, 0) // ALIGNMENT * ALIGNMENT
    return first


@triton.jit
def divide(
    context_ends,
    num_sequences,
    spare,
    shared_tokens,
    sliding_window,
    ALIGNMENT: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """The length of a piece, a multiple of TILE or LEAST, and how many pieces each sequence has, `[SLOTS]`."""
    sequence = tl.arange(0, SLOTS)
    ends = tl.load(context_ends + sequence, mask=sequence < num_sequences, other=0).to(tl.int32)
    tokens = tl.maximum(ends - first_token(ends, shared_tokens, sliding_window, ALIGNMENT), 0)
    piece = piece_length(tl.sum(tokens, 0), spare, TILE, LEAST)
    return piece, tl.cdiv(tokens, piece)


@triton.jit
def piece_length(tokens, pieces, TILE: tl.constexpr, LEAST: tl.constexpr):
    """The least multiple of TILE, but at least LEAST, of which `pieces` hold so many tokens."""
    return tl.maximum(LEAST, tl.cdiv(tl.cdiv(tokens, pieces), TILE) * TILE)
