"""Merges what attention to pieces of a context left behind into attention to all of it."""

import torch
import triton
import triton.language as tl

from kernels.interface import AttentionBatch, AttentionParams
from kernels.triton.decode_plan import DecodePlan
from kernels.triton.tuning import padded_dim
from kernels.triton.work_division import count_slots, divide, piece_length

_ELEMENTS_AT_ONCE = 4096
"""32 registers for each of 128 threads."""


@triton.jit(do_not_specialize=["num_sequences", "spare", "sliding_window", "shares"])
def merge_partials(
    out,
    partials,
    log_sums,
    context_ends,
    shared_blocks,
    num_sequences,
    spare,
    shares,
    out_stride,
    sliding_window,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SHARED_TILE: tl.constexpr,
    LEAST: tl.constexpr,
    SLOTS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Grid (KV heads, sequences). PARTS partial results are merged at once.

    A partial result is a weighted mean of V and the logarithm of its sum of weights. The pieces of all sequences come
    first, in order, then from entry `num_sequences + spare` on those of the shared prefix, `[shares, num_sequences]`.
    """
    kv_head = tl.program_id(0)
    sequence = tl.program_id(1)
    shared_tokens = 0
    shared_parts = 0
    if shared_blocks is not None:
        shared_tokens = tl.load(shared_blocks).to(tl.int32) * BLOCK_SIZE
        shared_parts = tl.cdiv(shared_tokens, piece_length(shared_tokens, shares, SHARED_TILE, LEAST))
    ALIGNMENT: tl.constexpr = min(BLOCK_SIZE, TILE)
    _, pieces = divide(context_ends, num_sequences, spare, shared_tokens, sliding_window, ALIGNMENT, TILE, LEAST, SLOTS)
    slot = tl.arange(0, SLOTS)
    own_parts = tl.sum(tl.where(slot == sequence, pieces, 0), 0)
    parts = own_parts + shared_parts
    if (shared_parts == 0) & (own_parts <= 1):
        return
    first = tl.sum(tl.where(slot < sequence, pieces, 0), 0)
    shared_first = num_sequences + spare + sequence - own_parts * num_sequences

    head = kv_head * GROUP + tl.arange(0, PADDED_GROUP)
    is_head = tl.arange(0, PADDED_GROUP) < GROUP
    dims = tl.arange(0, PADDED_DIM)
    num_heads = tl.num_programs(0) * GROUP
    maximum = tl.full([PADDED_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([PADDED_GROUP], tl.float32)
    accumulator = tl.zeros([PADDED_GROUP, PADDED_DIM], tl.float32)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        entry = tl.where(part < own_parts, first + part, shared_first + part * num_sequences)
        rows = (entry * num_heads)[:, None] + head[None, :]
        mask = (part < parts)[:, None] & is_head[None, :]
        log_sum = tl.load(log_sums + rows, mask=mask, other=float("-inf"))
        values = tl.load(
            partials + rows.to(tl.int64)[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=mask[:, :, None] & (dims < HEAD_DIM)[None, None, :],
            other=0.0,
        )
        # Rows that are no head stay finite, so that nothing is infinity minus infinity.
        new_maximum = tl.where(is_head, tl.maximum(maximum, tl.max(log_sum, 0)), 0.0)
        correction = tl.exp2(maximum - new_maximum)
        weights = tl.exp2(log_sum - new_maximum[None, :])
        total = total * correction + tl.sum(weights, 0)
        accumulator = accumulator * correction[:, None] + tl.sum(values * weights[:, :, None], 0)
        maximum = new_maximum
    result = accumulator / tl.where(is_head, total, 1.0)[:, None]
    pointers = out + sequence.to(tl.int64) * out_stride + head[:, None] * HEAD_DIM + dims[None, :]
    tl.store(pointers, result.to(out.dtype.element_ty), mask=is_head[:, None] & (dims < HEAD_DIM)[None, :])


def launch_merge(
    plan: DecodePlan,
    out: torch.Tensor,
    partials: torch.Tensor,
    log_sums: torch.Tensor,
    shared_blocks: torch.Tensor | None,
    batch: AttentionBatch,
    params: AttentionParams,
    num_kv_heads: int,
    block_size: int,
) -> None:
    """Write the rows of `out` of all decodes that have more than one partial result."""
    num_sequences, head_dim = batch.num_decodes, out.shape[2]
    group = out.shape[1] // num_kv_heads
    padded_group = triton.next_power_of_2(group)
    merge_partials[num_kv_heads, num_sequences](
        out,
        partials,
        log_sums,
        batch.context_ends,
        shared_blocks,
        num_sequences,
        plan.spare,
        plan.shares,
        out.stride(0),
        params.sliding_window,
        GROUP=group,
        PADDED_GROUP=padded_group,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim(head_dim),
        BLOCK_SIZE=block_size,
        TILE=plan.tiling.tile,
        SHARED_TILE=plan.shared_tiling.tile,
        LEAST=plan.least_piece,
        SLOTS=count_slots(num_sequences),
        PARTS=parts_at_once(padded_group, head_dim),
        num_warps=4,
    )


def parts_at_once(padded_group: int, head_dim: int) -> int:
    """How many partial results of a group of heads are merged at once."""
    return max(1, _ELEMENTS_AT_ONCE // (padded_group * padded_dim(head_dim)))
