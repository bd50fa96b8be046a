"""Causal attention of chunks of new tokens over their sequences' paged contexts, all sequences in one launch.

The rows of a query tile are tokens times the query heads that share a KV head, so that K and V are read once for all
of them. A row attends by the online softmax of FlashAttention-2 (Dao, arXiv 2307.08691), base 2. Tiles of K and V that
all rows see in full come first and carry no mask. Then come the tiles at the edges: the diagonal and, with a sliding
window, its far end.

On sm_90 the inner loop converts no layout: both products are wgmma, K and V wait in up to three stages of shared
memory that `cp.async` fills 16 bytes at a time, scores and weights stay in registers. With head_dim 128 in bfloat16 a
tile takes a warp 437 instructions, 552 at the edges. That is 874 cycles of issuing for a program's 8 warps, beside the
1024 cycles that the matrix units need.
"""

import torch
import triton
import triton.language as tl

from kernels.interface import AttentionBatch, AttentionParams
from kernels.kv_pool import KvPool
from kernels.triton.decode_attention import find_device, score_factors
from kernels.triton.interpret import dot
from kernels.triton.prefill_tuning import choose_prefill_tiling
from kernels.triton.tuning import Tiling, padded_dim


@triton.jit
def _first_tile(query_start, sequence, num_decodes, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """The first tile of a sequence: the rows before it fill at most so many, one of them begun by each sequence."""
    return (query_start - num_decodes) * GROUP // ROWS + sequence - num_decodes


@triton.jit
def _find_sequence(query_starts, tile, num_decodes, num_sequences, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """The last sequence whose first tile is not after `tile`."""
    sequence = num_decodes
    end = num_sequences
    while sequence + 1 < end:
        middle = (sequence + end) // 2
        query_start = tl.load(query_starts + middle).to(tl.int32)
        if _first_tile(query_start, middle, num_decodes, GROUP, ROWS) <= tile:
            sequence = middle
        else:
            end = middle
    return sequence


@triton.jit
def _find_rows(query_starts, sequence, tile, num_decodes, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """The sequence's first token in the batch, the tile's first row in the sequence, and the sequence's rows."""
    # Volatile, so that what is called for again is computed again.
    query_start = tl.load(query_starts + sequence, volatile=True).to(tl.int32)
    num_rows = (tl.load(query_starts + sequence + 1).to(tl.int32) - query_start) * GROUP
    first_row = (tile - _first_tile(query_start, sequence, num_decodes, GROUP, ROWS)) * ROWS
    return query_start, first_row, num_rows


@triton.jit
def _row_offsets(query_start, rows, kv_head, token_stride, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr):
    token = (query_start + rows // GROUP).to(tl.int64)
    return token * token_stride + (kv_head * GROUP + rows % GROUP) * HEAD_DIM


@triton.jit
def _block_ids(table, positions, context_end, BLOCK_SIZE: tl.constexpr):
    return tl.load(table + positions // BLOCK_SIZE, mask=positions < context_end, other=0)


@triton.jit(
    do_not_specialize=["layer", "num_decodes", "num_sequences", "table_stride", "sliding_window"],
    do_not_specialize_on_alignment=["block_tables", "query_starts", "context_ends"],
)
def prefill_attention(
    out,
    query,
    blocks,
    scales,
    block_tables,
    query_starts,
    context_ends,
    layer,
    num_decodes,
    num_sequences,
    out_stride,
    query_stride,
    table_stride,
    block_stride,
    layer_stride,
    value_stride,
    head_stride,
    scale_stride,
    factor,
    cap,
    sliding_window,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """A program attends for ROWS rows of one sequence and KV head.

    Args:
        out: [tokens, num_heads, HEAD_DIM], like `query` contiguous but for its first dimension.
        query: [tokens, num_heads, HEAD_DIM].
        blocks: the pool's, of all layers.
        scales: the pool's; None if it is not quantised.
        block_tables: [sequences, ...] int64.
        query_starts: [sequences + 1] int64.
        context_ends: [sequences] int64.
        layer: of the pool.
        num_decodes: sequences before the first that is attended for; each has one row in the batch.
        num_sequences: of the batch.
        out_stride: elements from token to token; so `query_stride`. Strides but `table_stride` are multiples of 16.
        query_stride: see above.
        table_stride: elements from sequence to sequence.
        block_stride: elements of `blocks` from block to block; so for layers, from K to V, and for KV heads.
        layer_stride: see above.
        value_stride: see above.
        head_stride: see above.
        scale_stride: elements of `scales` from block to block.
        factor: makes a dot product a score, times log2(e); with a soft cap the argument of tanh, times 2 log2(e).
            Positive.
        cap: the soft cap times log2(e), or None.
        sliding_window: tokens, or None.
        GROUP: query heads that share a KV head.
        HEAD_DIM: a multiple of 16.
        PADDED_DIM: the power of two that it is padded to.
        BLOCK_SIZE: tokens, a power of two.
        ROWS: of a query tile, a power of two.
        TILE: tokens of K and V read at once, a power of two.
    """
    # The last tile of a sequence sees most and starts first, so that no long one is left for the end.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = _find_sequence(query_starts, tile, num_decodes, num_sequences, GROUP, ROWS)
    query_start, first_row, num_rows = _find_rows(query_starts, sequence, tile, num_decodes, GROUP, ROWS)
    if first_row >= num_rows:
        return

    context_end = tl.load(context_ends + sequence).to(tl.int32)
    row = first_row + tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED_DIM)
    is_dim = (dims < HEAD_DIM)[None, :]
    queries = tl.load(
        query + _row_offsets(query_start, row, kv_head, query_stride, GROUP, HEAD_DIM)[:, None] + dims[None, :],
        mask=(row < num_rows)[:, None] & is_dim,
        other=0.0,
    )
    chunk_start = context_end - num_rows // GROUP
    position = tl.minimum(chunk_start + row // GROUP, context_end - 1)
    lowest = chunk_start + first_row // GROUP
    highest = tl.minimum(chunk_start + (first_row + ROWS - 1) // GROUP, context_end - 1)

    # All rows see the tiles from `whole` to `diagonal` in full. Tiles begin at multiples of TILE.
    diagonal = (lowest + 1) // TILE * TILE
    first = 0
    whole = 0
    if sliding_window is not None:
        first = tl.maximum(lowest + 1 - sliding_window, 0) // TILE * TILE
        whole = tl.minimum(tl.cdiv(tl.maximum(highest + 1 - sliding_window, 0), TILE) * TILE, diagonal)
    num_whole = diagonal - whole
    first_edge = tl.where(first < whole, first, diagonal)

    within = layer.to(tl.int64) * layer_stride + kv_head * head_stride
    keys = blocks + within
    if scales is not None:
        key_scales = scales + within // HEAD_DIM
    table = block_tables + sequence.to(tl.int64) * table_stride
    token = tl.arange(0, TILE)
    # Finite, so that a row that has seen nothing yet weighs hidden tokens 2^(-inf - maximum) = 0, not NaN.
    maximum = tl.full([ROWS], -1e38, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    accumulator = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    # The pipeliner does not fetch ahead what is addressed by a load of the same iteration, so the ids of a tile are
    # loaded one iteration early.
    ids = _block_ids(table, tl.where(num_whole > 0, whole, first_edge) + token, context_end, BLOCK_SIZE)
    bounds = (whole, diagonal, first, highest + 1 - num_whole)
    for is_edge in tl.static_range(2):
        for step in tl.range(bounds[2 * is_edge], bounds[2 * is_edge + 1], TILE):
            if is_edge:  # the edges are stepped through as if what lies between them did not exist
                start = tl.where(step < whole, step, step + num_whole)
                following = tl.where(step + TILE < whole, step + TILE, step + TILE + num_whole)
            else:
                start = step
                following = tl.where(step + TILE < diagonal, step + TILE, first_edge)
            seen = start + token
            in_block = seen % BLOCK_SIZE
            pointers = keys + (ids * block_stride + in_block * HEAD_DIM)[:, None] + dims[None, :]
            if scales is not None:
                scale_pointers = key_scales + ids * scale_stride + in_block
            ids = _block_ids(table, following + token, context_end, BLOCK_SIZE)

            key = tl.load(pointers, mask=is_dim, other=0.0)
            if scales is not None:
                # Scales go with K and V, not with scores and weights: there they would be needed in another layout,
                # which costs 70 registers.
                key = key.to(tl.float32) * tl.load(scale_pointers)[:, None]
            scores = dot(queries, tl.trans(key.to(queries.dtype)), tl.zeros([ROWS, TILE], tl.float32))
            score_factor = factor
            if cap is not None:
                scores = cap - 2 * cap / (1 + tl.exp2(scores * factor))  # cap * tanh
                score_factor = 1.0
            if is_edge:
                visible = seen[None, :] <= position[:, None]
                if sliding_window is not None:
                    visible &= seen[None, :] > position[:, None] - sliding_window
                scores = tl.where(visible, scores, float("-inf"))

            new_maximum = tl.maximum(maximum, tl.max(scores, 1) * score_factor)
            weights = tl.exp2(scores * score_factor - new_maximum[:, None])
            correction = tl.exp2(maximum - new_maximum)
            maximum = new_maximum
            total = total * correction + tl.sum(weights, 1)
            accumulator *= correction[:, None]

            # A weight of 0 does not hide NaN, so unused slots are not read.
            mask = is_dim & (seen < context_end)[:, None] if is_edge else is_dim
            value = tl.load(pointers + value_stride, mask=mask, other=0.0)
            if scales is not None:
                value_scales = scale_pointers + value_stride // HEAD_DIM
                value = value.to(tl.float32) * tl.load(value_scales, mask=seen < context_end, other=0.0)[:, None]
            accumulator = dot(weights.to(queries.dtype), value.to(queries.dtype), accumulator)

    # Where rows go is looked up again: kept since the beginning it would take 29 registers through both loops.
    query_start, first_row, num_rows = _find_rows(query_starts, sequence, tile, num_decodes, GROUP, ROWS)
    row = first_row + tl.arange(0, ROWS)
    tl.store(
        out + _row_offsets(query_start, row, kv_head, out_stride, GROUP, HEAD_DIM)[:, None] + dims[None, :],
        (accumulator * (1 / total)[:, None]).to(out.dtype.element_ty),
        mask=(row < num_rows)[:, None] & is_dim,
    )


def attend_prefills(
    out: torch.Tensor,
    query: torch.Tensor,
    kv_pool: KvPool,
    layer: int,
    batch: AttentionBatch,
    params: AttentionParams,
) -> None:
    """Write the attention of all tokens but the batch's decodes to their rows of `out`.

    Args:
        out: [tokens, num_heads, head_dim], of which the last two dimensions are contiguous.
        query: as `out`, in any floating-point type of 16 or 32 bits.
        kv_pool: the pool.
        layer: of the pool.
        batch: the step's.
        params: of the layer; its scale is positive.

    Raises:
        ValueError: head_dim is not a multiple of 16, or more than 256.
    """
    num_prefills = len(batch.query_lengths) - batch.num_decodes
    if num_prefills:
        num_kv_heads, head_dim = kv_pool.blocks.shape[3], kv_pool.blocks.shape[5]
        rows = (query.shape[0] - batch.num_decodes) * query.shape[1] // num_kv_heads
        element_bytes = 4 if query.dtype == torch.float32 else kv_pool.blocks.element_size()
        capability = find_device(query.device).capability
        tiling = choose_prefill_tiling(capability, head_dim, element_bytes, rows // num_prefills)
        launch_prefills(tiling, out, query, kv_pool, layer, batch, params)


def launch_prefills(
    tiling: Tiling,
    out: torch.Tensor,
    query: torch.Tensor,
    kv_pool: KvPool,
    layer: int,
    batch: AttentionBatch,
    params: AttentionParams,
) -> None:
    """`attend_prefills` with a given tiling, for at least one sequence."""
    blocks, scales = kv_pool.blocks, kv_pool.scales
    num_kv_heads, block_size, head_dim = blocks.shape[3:]
    group = query.shape[1] // num_kv_heads
    factor, cap = score_factors(params)
    num_sequences = len(batch.query_lengths)
    rows = (query.shape[0] - batch.num_decodes) * group
    # Every sequence may leave a tile partly filled. Which tile is whose is known on the device only.
    grid = (rows // tiling.rows + num_sequences - batch.num_decodes, num_kv_heads)
    prefill_attention[grid](
        out,
        query,
        blocks,
        scales,
        batch.block_tables,
        batch.query_starts,
        batch.context_ends,
        layer,
        batch.num_decodes,
        num_sequences,
        out.stride(0),
        query.stride(0),
        batch.block_tables.stride(0),
        *blocks.stride()[:4],
        0 if scales is None else scales.stride(0),
        factor,
        cap,
        params.sliding_window,
        GROUP=group,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim(head_dim),
        BLOCK_SIZE=block_size,
        ROWS=tiling.rows,
        TILE=tiling.tile,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
