"""Paged attention out of torch's operations: gather a context's blocks, then dense attention over them.

Decodes are batched: sequences of similar length form a group that is padded to its longest, and the query heads that
share a KV head are the rows of one small matrix product, so K and V are never repeated. Prefills go one at a time
through torch's fused attention. With 32 sequences of 150 tokens (SmolLM2's shapes, two Zen 4 cores) a layer takes
0.8 ms, half of that for the gather.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.cpu.paged_context import PagedContext, prepare_context
from kernels.cpu.rotary import rotary
from kernels.interface import AttentionBatch, AttentionParams
from kernels.kv_pool import KvPool

_GROUP_SLACK_BLOCKS = 4


@dataclass(frozen=True)
class DecodeGroup:
    """Sequences with one new token each and contexts of similar length."""

    tokens: slice | torch.Tensor
    """Their rows in the batch."""
    context: PagedContext
    mask: torch.Tensor
    """[sequences * num_kv_heads, 1, length]: 0 where a token may be seen, else -inf."""
    unused: torch.Tensor
    """Slots of the gathered context, seen as [slots, head_dim], that hold no token."""

    def attend(self, query: torch.Tensor, pool_rows: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention of `query [sequences, num_heads, head_dim]`."""
        head_dim = query.shape[-1]
        key, value = self.context.gather(pool_rows)
        # The mask gives unused slots the weight 0, but 0 * NaN is NaN.
        self.context.gathered.view(-1, head_dim).index_fill_(0, self.unused, 0.0)
        queries = query.reshape(self.mask.shape[0], -1, head_dim)  # [sequences * kv_heads, heads per kv_head, head_dim]
        scores = torch.baddbmm(self.mask, queries, key.flatten(0, 1).transpose(1, 2), alpha=scale)
        return torch.bmm(scores.softmax(-1), value.flatten(0, 1)).view(query.shape)


@dataclass(frozen=True)
class Prefill:
    """One sequence's chunk of new tokens."""

    tokens: slice
    """Their rows in the batch."""
    context: PagedContext
    length: int
    """Gathered slots up to the last new token."""
    mask: torch.Tensor | None
    """[tokens, length]: 0 where a token may be seen, else -inf; None if the context is no more than the chunk."""

    def attend(self, query: torch.Tensor, pool_rows: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention of `query [tokens, num_heads, head_dim]`."""
        key, value = self.context.gather(pool_rows)
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1).unsqueeze(0),
            key[:, :, : self.length],
            value[:, :, : self.length],
            attn_mask=self.mask,
            is_causal=self.mask is None,
            scale=scale,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)


@dataclass(frozen=True)
class CpuAttention:
    """One step's attention."""

    kv_pool: torch.Tensor
    slot_rows: torch.Tensor
    """[tokens * 2 * num_kv_heads]: rows of layer 0 in the pool, seen as [rows, head_dim], of the new tokens."""
    parts: list[DecodeGroup | Prefill]
    """Every token is in exactly one."""
    scale: float

    def rotate_and_store(self, layer: int, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotate Q and K of `qkv [tokens, num_heads + 2 * num_kv_heads, head_dim]`, write K and V into their slots."""
        _, _, _, num_kv_heads, block_size, head_dim = self.kv_pool.shape
        num_heads = qkv.shape[1] - 2 * num_kv_heads
        rotary(qkv[:, : num_heads + num_kv_heads], cos, sin)
        key_value = qkv[:, num_heads:]
        layer_rows = self.kv_pool.view(-1, head_dim)[layer * 2 * num_kv_heads * block_size :]
        layer_rows.index_copy_(0, self.slot_rows, key_value.reshape(-1, head_dim))

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Attention of `query [tokens, num_heads, head_dim]`."""
        _, _, _, num_kv_heads, block_size, head_dim = self.kv_pool.shape
        layer_rows = self.kv_pool.view(-1, block_size * head_dim)[layer * 2 * num_kv_heads :]
        out = query.new_empty(query.shape)
        for part in self.parts:
            out[part.tokens] = part.attend(query[part.tokens], layer_rows, self.scale)
        return out


def prepare_attention(batch: AttentionBatch, kv_pool: KvPool, params: AttentionParams) -> CpuAttention:
    """Derive rows and masks of one step.

    Raises:
        ValueError: the pool does not hold float32, or scores have a soft cap.
    """
    if kv_pool.blocks.dtype != torch.float32:
        raise ValueError(f"kernels 'cpu' keep K and V in float32, not {kv_pool.blocks.dtype}")
    if params.soft_cap is not None:
        raise ValueError("kernels 'cpu' have no soft cap")
    blocks, sliding_window = kv_pool.blocks, params.sliding_window
    decodes = [(batch.context_lengths[i], i) for i in range(batch.num_decodes)]
    groups = group_by_length(decodes, blocks.shape[4])
    parts: list[DecodeGroup | Prefill] = [
        _decode_group(batch, blocks, group, len(groups) == 1, sliding_window) for group in groups
    ]
    first_token = batch.num_decodes
    for sequence in range(batch.num_decodes, len(batch.query_lengths)):
        parts.append(_prefill(batch, blocks, sequence, first_token, sliding_window))
        first_token += batch.query_lengths[sequence]
    return CpuAttention(blocks, _slot_rows(blocks, batch.slot_mapping), parts, params.scale)


def group_by_length(decodes: list[tuple[int, int]], block_size: int) -> list[list[int]]:
    """Split (context length, sequence) into groups whose padding is small beside what it pads.

    Each group costs five more operations a layer (about 50 us), each block of padding 24 KB read a layer.
    """
    groups: list[list[int]] = []
    longest = 0
    for length, sequence in sorted(decodes, reverse=True):
        blocks = -(-length // block_size)
        if not groups or longest - blocks > max(_GROUP_SLACK_BLOCKS, longest // 4):
            groups.append([])
            longest = blocks
        groups[-1].append(sequence)
    return groups if len(groups) > 1 else [sorted(group) for group in groups]


def _decode_group(
    batch: AttentionBatch, kv_pool: torch.Tensor, group: list[int], is_whole: bool, sliding_window: int | None
) -> DecodeGroup:
    num_kv_heads, block_size = kv_pool.shape[3:5]
    members = torch.tensor(group)
    lengths = torch.tensor([batch.context_lengths[i] for i in group])
    first_blocks = (
        torch.zeros_like(lengths) if sliding_window is None else (lengths - sliding_window).clamp(min=0) // block_size
    )
    num_blocks = int((-(-lengths // block_size) - first_blocks).max())
    context = prepare_context(kv_pool, batch.block_tables[members], first_blocks, num_blocks)
    unused = context.positions >= lengths.unsqueeze(1)
    hidden = unused
    if sliding_window is not None:
        hidden = unused | (context.positions < lengths.unsqueeze(1) - sliding_window)
    mask = _mask(hidden).repeat_interleave(num_kv_heads, 0).unsqueeze(1)
    unused = unused.view(1, len(group), 1, -1).expand(2, -1, num_kv_heads, -1)
    return DecodeGroup(
        slice(0, len(group)) if is_whole else members, context, mask, unused.flatten().nonzero().squeeze(1)
    )


def _prefill(
    batch: AttentionBatch, kv_pool: torch.Tensor, sequence: int, first_token: int, sliding_window: int | None
) -> Prefill:
    block_size = kv_pool.shape[4]
    tokens, context_length = batch.query_lengths[sequence], batch.context_lengths[sequence]
    first_position = context_length - tokens
    first_block = 0 if sliding_window is None else max(0, first_position + 1 - sliding_window) // block_size
    table = batch.block_tables[sequence : sequence + 1]
    context = prepare_context(
        kv_pool, table, torch.tensor([first_block]), -(-context_length // block_size) - first_block
    )
    length = context_length - first_block * block_size
    mask = None
    if sliding_window is not None or first_position > 0:
        distance = torch.arange(first_position, context_length).unsqueeze(1) - context.positions[0, :length]
        hidden = distance < 0
        if sliding_window is not None:
            hidden |= distance >= sliding_window
        mask = _mask(hidden)
    return Prefill(slice(first_token, first_token + tokens), context, length, mask)


def _slot_rows(kv_pool: torch.Tensor, slot_mapping: torch.Tensor) -> torch.Tensor:
    _, num_layers, _, num_kv_heads, block_size, _ = kv_pool.shape
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    first = blocks * (num_layers * 2 * num_kv_heads * block_size) + offsets
    return (first.unsqueeze(1) + torch.arange(2 * num_kv_heads) * block_size).flatten()


def _mask(hidden: torch.Tensor) -> torch.Tensor:
    return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
