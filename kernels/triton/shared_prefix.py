"""Attention of all decodes to the prefix that their block tables have in common, which is read once for all of them."""

import torch
import triton
import triton.language as tl

from kernels.interface import AttentionBatch
from kernels.triton.decode_plan import DecodePlan
from kernels.triton.paged_tiles import attend_tiles
from kernels.triton.tuning import padded_dim
from kernels.triton.work_division import piece_length


@triton.jit(do_not_specialize=["num_rows"])
def attend_shared_prefix(
    partials,
    log_sums,
    query,
    blocks,
    scales,
    block_table,
    shared_blocks,
    num_rows,
    query_stride,
    block_stride,
    scale_stride,
    factor,
    cap,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Grid (KV heads, pieces, tiles of rows); a row is a query head of a sequence.

    `partials [pieces, sequences, heads, HEAD_DIM]` and `log_sums [pieces, sequences, heads]` in float32.
    """
    kv_head = tl.program_id(0)
    shared_tokens = tl.load(shared_blocks).to(tl.int32) * BLOCK_SIZE
    piece = piece_length(shared_tokens, tl.num_programs(1), TILE, LEAST)
    begin = tl.program_id(1) * piece
    end = tl.minimum(begin + piece, shared_tokens)
    if begin >= end:
        return
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    sequence = row // GROUP
    head = kv_head * GROUP + row % GROUP
    dims = tl.arange(0, PADDED_DIM)
    mask = (row < num_rows)[:, None] & (dims < HEAD_DIM)[None, :]
    query_rows = sequence.to(tl.int64) * query_stride + head * HEAD_DIM
    if scales is not None:
        scales += kv_head * BLOCK_SIZE
    result, log_sum = attend_tiles(
        tl.load(query + query_rows[:, None] + dims[None, :], mask=mask, other=0.0),
        blocks + kv_head * (BLOCK_SIZE * (HEAD_DIM if scales is None else HEAD_DIM // 2)),
        scales,
        block_table,
        begin,
        None,
        end,
        block_stride,
        scale_stride,
        factor,
        cap,
        NUM_KV_HEADS,
        HEAD_DIM,
        BLOCK_SIZE,
        TILE,
    )
    out_row = (tl.program_id(1) * (num_rows // GROUP) + sequence) * (NUM_KV_HEADS * GROUP) + head
    tl.store(partials + out_row.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :], result, mask=mask)
    tl.store(log_sums + out_row, log_sum, mask=row < num_rows)


def launch_shared_prefix(
    plan: DecodePlan,
    partials: torch.Tensor,
    log_sums: torch.Tensor,
    query: torch.Tensor,
    blocks: torch.Tensor,
    scales: torch.Tensor | None,
    batch: AttentionBatch,
    factor: float,
    cap: float | None,
) -> None:
    """Write `plan.shares` partial results for each decode; none of those that the prefix is too short for.

    Args:
        plan: of the batch.
        partials: [plan.shares * sequences, num_heads, head_dim] float32, all of the first share first.
        log_sums: [plan.shares * sequences, num_heads] float32.
        query: [tokens, num_heads, head_dim].
        blocks: of the layer, [num_blocks, 2, num_kv_heads, block_size, head_dim], or int16 with half of head_dim.
        scales: of the layer, [num_blocks, 2, num_kv_heads, block_size].
        batch: with `shared_blocks`.
        factor: see `attend_tiles`.
        cap: see `attend_tiles`.
    """
    num_kv_heads, block_size = blocks.shape[2:4]
    group, head_dim = query.shape[1] // num_kv_heads, query.shape[2]
    num_rows = batch.num_decodes * group
    tiling = plan.shared_tiling
    attend_shared_prefix[num_kv_heads, plan.shares, triton.cdiv(num_rows, tiling.rows)](
        partials,
        log_sums,
        query,
        blocks,
        scales,
        batch.block_tables,
        batch.shared_blocks,
        num_rows,
        query.stride(0),
        blocks.stride(0),
        0 if scales is None else scales.stride(0),
        factor,
        cap,
        GROUP=group,
        ROWS=tiling.rows,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim(head_dim),
        BLOCK_SIZE=block_size,
        TILE=tiling.tile,
        LEAST=plan.least_piece,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
