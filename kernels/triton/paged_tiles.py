"""The inner loop of attention over a paged context: tiles of several blocks, or parts of one."""

import triton
import triton.language as tl

from kernels.triton.e4m3 import LIFT, UNLIFT, unpack
from kernels.triton.interpret import dot


@triton.jit
def attend_tiles(
    query,
    keys,
    key_scales,
    table,
    begin,
    first_visible,
    end,
    block_stride,
    scale_stride,
    factor,
    cap,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Attention of `query [ROWS, PADDED_DIM]` over a sequence's tokens before `end`.

    Args:
        query: zero beyond HEAD_DIM.
        keys: K of the layer and head in block 0; V of a head follows K of all heads. A quantised pool is read as int16.
        key_scales: of the layer and head in block 0; None if the pool is not quantised.
        table: the sequence's block ids.
        begin: where reading begins, a multiple of min(BLOCK_SIZE, TILE), less than `end`.
        first_visible: before `end`, less than TILE after `begin`; None: `begin`.
        end: no slot from here on influences the result.
        block_stride: elements of `keys`, a multiple of 16.
        scale_stride: elements.
        factor: makes a dot product a score, times log2(e); with a soft cap the argument of tanh, times 2 log2(e).
        cap: the soft cap times log2(e), or None.
        NUM_KV_HEADS: of the pool.
        HEAD_DIM: a multiple of 16.
        BLOCK_SIZE: tokens, a power of two.
        TILE: tokens read at once, a power of two.

    Returns:
        The weighted mean of V `[ROWS, PADDED_DIM]`, and log2 of the sum of weights `[ROWS]`.
    """
    ROWS: tl.constexpr = query.shape[0]
    QUANTISED: tl.constexpr = key_scales is not None
    # Of a word and of a tile of words; a word is one element, or two of a quantised pool.
    WIDTH: tl.constexpr = HEAD_DIM // 2 if QUANTISED else HEAD_DIM
    COLUMNS: tl.constexpr = query.shape[1] // 2 if QUANTISED else query.shape[1]
    VALUE_OFFSET: tl.constexpr = NUM_KV_HEADS * BLOCK_SIZE * WIDTH
    # A span lies in one block. Ids are looked up once for each span; one for each row costs 8 loads a thread.
    SPAN: tl.constexpr = min(BLOCK_SIZE, TILE)
    SPANS: tl.constexpr = TILE // SPAN
    FACTOR_TYPE: tl.constexpr = tl.bfloat16 if QUANTISED and query.dtype != tl.float32 else query.dtype

    column = tl.arange(0, COLUMNS)
    token = tl.arange(0, TILE)
    span = tl.arange(0, SPANS)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    # Summed up over the columns at the very end: that saves two barriers a tile, for columns are spread over warps.
    weight_sums = tl.zeros([ROWS, TILE], tl.float32)
    accumulator = tl.zeros([ROWS, COLUMNS], tl.float32)
    if QUANTISED:
        odd_accumulator = tl.zeros([ROWS, COLUMNS], tl.float32)
        lifted = (query.to(tl.float32) * LIFT).to(FACTOR_TYPE)
        query, odd_query = tl.split(tl.reshape(lifted, [ROWS, COLUMNS, 2]))

    # The pipeliner does not fetch ahead what is addressed by a load of the same iteration, so the ids of a tile are
    # loaded one iteration early.
    ids = tl.load(table + begin // BLOCK_SIZE + span, mask=begin + span * SPAN < end, other=0)
    for start in range(begin, end, TILE):
        in_block = start % BLOCK_SIZE + token % SPAN
        offsets = tl.reshape(tl.broadcast_to((ids * block_stride)[:, None], (SPANS, SPAN)), (TILE,))
        # Without the hint Triton 3.6 forgets in `reshape` that strides are multiples of 16, and loads 2 bytes at once.
        offsets = tl.multiple_of(offsets, 16) + in_block * WIDTH
        if QUANTISED:
            scale_offsets = (
                tl.reshape(tl.broadcast_to((ids * scale_stride)[:, None], (SPANS, SPAN)), (TILE,)) + in_block
            )
        ahead = start + TILE
        ids = tl.load(table + ahead // BLOCK_SIZE + span, mask=ahead + span * SPAN < end, other=0)

        position = start + token
        inside = position < end
        pointers = keys + offsets[:, None] + column[None, :]
        mask = inside[:, None] & (column < WIDTH)[None, :]
        key = tl.load(pointers, mask=mask, other=0)
        scores = tl.zeros([ROWS, TILE], tl.float32)
        if QUANTISED:
            even, odd = unpack(key)
            scores = dot(query, tl.trans(even.to(FACTOR_TYPE)), scores)
            scores = dot(odd_query, tl.trans(odd.to(FACTOR_TYPE)), scores)
            scores *= (tl.load(key_scales + scale_offsets, mask=inside, other=0.0) * (factor * UNLIFT))[None, :]
        else:
            scores = dot(query, tl.trans(key), scores) * factor
        if cap is not None:
            scores = cap - 2 * cap / (1 + tl.exp2(scores))  # cap * tanh
        visible = inside
        if first_visible is not None:
            visible = inside & (position >= first_visible)
        scores = tl.where(visible[None, :], scores, float("-inf"))

        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        correction = tl.exp2(maximum - new_maximum)
        weights = tl.exp2(scores - new_maximum[:, None])
        weight_sums = weight_sums * correction[:, None] + weights
        maximum = new_maximum
        accumulator = accumulator * correction[:, None]
        # Masked, for 0 * NaN is NaN.
        value = tl.load(pointers + VALUE_OFFSET, mask=mask, other=0)
        if QUANTISED:
            even, odd = unpack(value)
            value_scales = key_scales + NUM_KV_HEADS * BLOCK_SIZE
            weights *= (tl.load(value_scales + scale_offsets, mask=inside, other=0.0) * LIFT)[None, :]
            factors = weights.to(FACTOR_TYPE)
            odd_accumulator = dot(factors, odd.to(FACTOR_TYPE), odd_accumulator * correction[:, None])
            accumulator = dot(factors, even.to(FACTOR_TYPE), accumulator)
        else:
            accumulator = dot(weights.to(FACTOR_TYPE), value, accumulator)

    total = tl.sum(weight_sums, 1)
    if QUANTISED:
        accumulator = tl.interleave(accumulator, odd_accumulator) * UNLIFT
    return accumulator / total[:, None], maximum + tl.log2(total)
