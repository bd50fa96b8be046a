"""Attention of sequences with one new token each over their paged contexts.

One program attends to one piece of one sequence for one KV head, with all query heads that share it as rows of one
tile, so that K and V are read once. Where sequences are cut into several pieces (flash decoding), or share a prefix
that is read once for all of them, programs leave partial results, and a last kernel merges them.
"""

import math

import torch
import triton
import triton.language as tl

from kernels.interface import AttentionBatch, AttentionParams
from kernels.kv_pool import KvPool
from kernels.triton.decode_plan import DecodePlan, DecodeShape, Device, plan_decodes
from kernels.triton.merge_partials import launch_merge
from kernels.triton.paged_tiles import attend_tiles
from kernels.triton.shared_prefix import launch_shared_prefix
from kernels.triton.tuning import padded_dim
from kernels.triton.work_division import count_slots, divide, first_token


@triton.jit(do_not_specialize=["num_sequences", "spare", "table_stride", "sliding_window"])
def decode_attention(
    out,
    partials,
    log_sums,
    query,
    blocks,
    scales,
    block_tables,
    context_ends,
    shared_blocks,
    num_sequences,
    spare,
    out_stride,
    query_stride,
    block_stride,
    scale_stride,
    table_stride,
    factor,
    cap,
    sliding_window,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Grid (KV heads, pieces); without `partials` a piece is a whole sequence.

    Heads vary fastest, for programs that run together then read neighbouring parts of the same blocks.
    """
    kv_head = tl.program_id(0)
    sequence = tl.program_id(1)
    ALIGNMENT: tl.constexpr = min(BLOCK_SIZE, TILE)
    shared_tokens = 0
    if shared_blocks is not None:
        shared_tokens = tl.load(shared_blocks).to(tl.int32) * BLOCK_SIZE
    offset = 0
    if partials is not None:
        piece, pieces = divide(
            context_ends, num_sequences, spare, shared_tokens, sliding_window, ALIGNMENT, TILE, LEAST, SLOTS
        )
        item = sequence
        sequence = tl.sum((tl.cumsum(pieces, 0) <= item).to(tl.int32), 0)
        if sequence >= num_sequences:
            return
        slot = tl.arange(0, SLOTS)
        offset = (item - tl.sum(tl.where(slot < sequence, pieces, 0), 0)) * piece
    context_end = tl.load(context_ends + sequence).to(tl.int32)
    first = first_token(context_end, shared_tokens, sliding_window, ALIGNMENT)
    begin = first + offset
    end = context_end
    if partials is not None:
        end = tl.minimum(begin + piece, context_end)
        # Decided here and not where it is needed: less is kept in registers while tiles are read.
        is_partial = (context_end - first > piece) | (shared_tokens > 0)
    if begin >= end:
        return

    row = tl.arange(0, ROWS)
    head = kv_head * GROUP + row
    dims = tl.arange(0, PADDED_DIM)
    mask = (row < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    within = head[:, None] * HEAD_DIM + dims[None, :]
    first_visible = None
    if sliding_window is not None:
        first_visible = context_end - sliding_window
    if scales is not None:
        scales += kv_head * BLOCK_SIZE
    result, log_sum = attend_tiles(
        tl.load(query + sequence.to(tl.int64) * query_stride + within, mask=mask, other=0.0),
        blocks + kv_head * (BLOCK_SIZE * (HEAD_DIM if scales is None else HEAD_DIM // 2)),
        scales,
        block_tables + sequence.to(tl.int64) * table_stride,
        begin,
        first_visible,
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
    if partials is not None:  # noqa: SIM102 - this is decided when the kernel is compiled, the other when it runs
        if is_partial:
            entry = tl.program_id(1) * (NUM_KV_HEADS * GROUP)
            tl.store(partials + entry.to(tl.int64) * HEAD_DIM + within, result, mask=mask)
            tl.store(log_sums + entry + head, log_sum, mask=row < GROUP)
            return
    tl.store(out + sequence.to(tl.int64) * out_stride + within, result.to(out.dtype.element_ty), mask=mask)


def attend_decodes(
    out: torch.Tensor,
    query: torch.Tensor,
    kv_pool: KvPool,
    layer: int,
    batch: AttentionBatch,
    params: AttentionParams,
) -> None:
    """Write the attention of the batch's decodes to the first `batch.num_decodes` rows of `out`.

    Args:
        out: [tokens, num_heads, head_dim], of which the last two dimensions are contiguous.
        query: as `out`, in the pool's dtype unless the pool is quantised.
        kv_pool: the pool.
        layer: of the pool.
        batch: when a captured graph is replayed, only the contents of its tensors may have changed.
        params: of the layer.

    Raises:
        ValueError: head_dim is not a multiple of 16, or more than 256.
    """
    if batch.num_decodes:
        plan = plan_decodes(plan_shape(query, kv_pool, batch, params), find_device(query.device))
        launch_decodes(plan, out, query, kv_pool, layer, batch, params)


def find_device(device: torch.device) -> Device:
    """What a plan must know of `device`. A CPU, which interprets one program after the other, counts as a small GPU."""
    if device.type != "cuda":
        return Device(capability=90, multiprocessors=1)
    properties = torch.cuda.get_device_properties(device)
    return Device(properties.major * 10 + properties.minor, properties.multi_processor_count)


def launch_decodes(
    plan: DecodePlan,
    out: torch.Tensor,
    query: torch.Tensor,
    kv_pool: KvPool,
    layer: int,
    batch: AttentionBatch,
    params: AttentionParams,
) -> None:
    """`attend_decodes` by a plan: one to three launches, whose grids depend on the plan and on shapes alone."""
    num_sequences, num_heads, head_dim = batch.num_decodes, *query.shape[1:]
    blocks, scales = kv_pool.blocks[:, layer], None
    if kv_pool.scales is not None:
        blocks, scales = blocks.view(torch.int16), kv_pool.scales[:, layer]
    num_kv_heads, block_size = blocks.shape[2:4]
    group = num_heads // num_kv_heads
    factor, cap = score_factors(params)
    shared_blocks = batch.shared_blocks if plan.shares else None
    pieces = num_sequences + plan.spare
    partials = log_sums = None
    if plan.spare:
        entries = pieces + plan.shares * num_sequences
        partials = query.new_empty((entries, num_heads, head_dim), dtype=torch.float32)
        log_sums = query.new_empty((entries, num_heads), dtype=torch.float32)
        if shared_blocks is not None:
            launch_shared_prefix(plan, partials[pieces:], log_sums[pieces:], query, blocks, scales, batch, factor, cap)
    decode_attention[num_kv_heads, pieces](
        out,
        partials,
        log_sums,
        query,
        blocks,
        scales,
        batch.block_tables,
        batch.context_ends,
        shared_blocks,
        num_sequences,
        plan.spare,
        out.stride(0),
        query.stride(0),
        blocks.stride(0),
        0 if scales is None else scales.stride(0),
        batch.block_tables.stride(0),
        factor,
        cap,
        params.sliding_window,
        GROUP=group,
        ROWS=max(16, triton.next_power_of_2(group)),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim(head_dim),
        BLOCK_SIZE=block_size,
        TILE=plan.tiling.tile,
        LEAST=plan.least_piece,
        SLOTS=count_slots(num_sequences),
        num_warps=plan.tiling.num_warps,
        num_stages=plan.tiling.num_stages,
    )
    if partials is not None and log_sums is not None:
        launch_merge(plan, out, partials, log_sums, shared_blocks, batch, params, num_kv_heads, block_size)


def plan_shape(query: torch.Tensor, kv_pool: KvPool, batch: AttentionBatch, params: AttentionParams) -> DecodeShape:
    """What `plan_decodes` must know of a batch and a layer."""
    _, _, _, num_kv_heads, block_size, head_dim = kv_pool.blocks.shape
    longest = max(batch.context_lengths[: batch.num_decodes])
    if params.sliding_window is not None:
        longest = min(longest, params.sliding_window + block_size)
    return DecodeShape(
        num_sequences=batch.num_decodes,
        longest=longest,
        num_kv_heads=num_kv_heads,
        group=query.shape[1] // num_kv_heads,
        head_dim=head_dim,
        element_bytes=4 if query.dtype == torch.float32 else kv_pool.blocks.element_size(),
        # A window shows at most a part of a shared prefix, and each sequence another one.
        has_shared_prefix=batch.shared_blocks is not None and params.sliding_window is None,
    )


def score_factors(params: AttentionParams) -> tuple[float, float | None]:
    """`factor` and `cap` as `attend_tiles` wants them."""
    log2_e = math.log2(math.e)
    if params.soft_cap is None:
        return params.scale * log2_e, None
    return 2 * log2_e * params.scale / params.soft_cap, params.soft_cap * log2_e
