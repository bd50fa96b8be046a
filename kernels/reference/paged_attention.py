"""Attention over a paged context (Kwon et al., SOSP '23, arXiv 2309.06180), one sequence at a time."""

from dataclasses import dataclass

import torch

from kernels.interface import PADDING_SLOT, AttentionBatch, AttentionParams
from kernels.kv_pool import KvPool
from kernels.reference.rotary import rotary

FP8_MAX = 448.0
"""Largest finite float8_e4m3fn; a token's largest element of a head is stored as this, its scale makes up for it."""


@dataclass(frozen=True)
class ReferenceAttention:
    """The batch as it came; every layer looks up everything again."""

    batch: AttentionBatch
    kv_pool: KvPool
    params: AttentionParams

    def rotate_and_store(self, layer: int, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotate Q and K of `qkv [tokens, num_heads + 2 * num_kv_heads, head_dim]`, write K and V into their slots."""
        num_kv_heads, block_size = self.kv_pool.blocks.shape[3:5]
        rotary(qkv[:, : qkv.shape[1] - num_kv_heads], cos, sin)
        key_value = qkv[:, qkv.shape[1] - 2 * num_kv_heads :].unflatten(1, (2, num_kv_heads))
        for token, slot in enumerate(self.batch.slot_mapping.tolist()):
            if slot != PADDING_SLOT:
                self._write(slot // block_size, slot % block_size, layer, key_value[token])

    def _write(self, block: int, offset: int, layer: int, values: torch.Tensor) -> None:
        """Store `values [2, num_kv_heads, head_dim]`."""
        if self.kv_pool.scales is not None:
            largest = values.float().abs().amax(-1)
            # A head of zeros has the scale 1, so that nothing is divided by 0.
            scales = torch.where(largest == 0, 1.0, largest / FP8_MAX)
            self.kv_pool.scales[block, layer, :, :, offset] = scales
            values = values.float() / scales.unsqueeze(-1)
        self.kv_pool.blocks[block, layer, :, :, offset] = values.to(self.kv_pool.blocks.dtype)

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Attention of `query [tokens, num_heads, head_dim]`, in float32."""
        out = []
        lengths = zip(self.batch.query_lengths, self.batch.context_lengths, strict=True)
        first = 0
        for sequence, (query_length, context_length) in enumerate(lengths):
            key, value = self._context(layer, sequence, context_length)
            out.append(self._attend_one(query[first : first + query_length], key, value))
            first += query_length
        return torch.cat(out).to(query.dtype)

    def _context(self, layer: int, sequence: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a sequence, `[num_kv_heads, length, head_dim]` each, from its blocks."""
        table = self.batch.block_tables[sequence, : -(-length // self.kv_pool.block_size)]
        blocks = self.kv_pool.blocks[table, layer].float()
        if self.kv_pool.scales is not None:
            blocks = blocks * self.kv_pool.scales[table, layer].unsqueeze(-1)
        key, value = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
        return key, value

    def _attend_one(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        group = query.shape[1] // key.shape[0]
        query = query.float().transpose(0, 1)  # [num_heads, tokens, head_dim]
        scores = query @ key.repeat_interleave(group, 0).transpose(1, 2) * self.params.scale
        if self.params.soft_cap is not None:
            scores = self.params.soft_cap * torch.tanh(scores / self.params.soft_cap)
        num_tokens, context_length = scores.shape[1:]
        position = torch.arange(context_length - num_tokens, context_length).unsqueeze(1)
        distance = position - torch.arange(context_length)
        hidden = distance < 0
        if self.params.sliding_window is not None:
            hidden |= distance >= self.params.sliding_window
        weights = scores.masked_fill(hidden.to(scores.device), float("-inf")).softmax(-1)
        return (weights @ value.repeat_interleave(group, 0)).transpose(0, 1)


def prepare_attention(batch: AttentionBatch, kv_pool: KvPool, params: AttentionParams) -> ReferenceAttention:
    """Nothing to derive."""
    return ReferenceAttention(batch, kv_pool, params)
