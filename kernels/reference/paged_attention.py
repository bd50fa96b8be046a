"""Attention over a paged context (Kwon et al., SOSP '23, arXiv 2309.06180), one sequence at a time."""

from dataclasses import dataclass

import torch

from kernels.interface import AttentionBatch


@dataclass(frozen=True)
class ReferenceAttention:
    """The batch as it came; every layer looks up everything again."""

    batch: AttentionBatch
    kv_pool: torch.Tensor
    scale: float
    sliding_window: int | None

    def store(self, layer: int, key_value: torch.Tensor) -> None:
        """Write `[tokens, 2, num_kv_heads, head_dim]` into the new tokens' slots."""
        block_size = self.kv_pool.shape[4]
        for token, slot in enumerate(self.batch.slot_mapping.tolist()):
            self.kv_pool[slot // block_size, layer, :, :, slot % block_size] = key_value[token]

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
        num_blocks = -(-length // self.kv_pool.shape[4])
        blocks = self.kv_pool[self.batch.block_tables[sequence, :num_blocks], layer]
        key, value = blocks.float().permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
        return key, value

    def _attend_one(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        group = query.shape[1] // key.shape[0]
        query = query.float().transpose(0, 1)  # [num_heads, tokens, head_dim]
        scores = query @ key.repeat_interleave(group, 0).transpose(1, 2) * self.scale
        num_tokens, context_length = scores.shape[1:]
        position = torch.arange(context_length - num_tokens, context_length).unsqueeze(1)
        distance = position - torch.arange(context_length)
        hidden = distance < 0
        if self.sliding_window is not None:
            hidden |= distance >= self.sliding_window
        weights = scores.masked_fill(hidden.to(scores.device), float("-inf")).softmax(-1)
        return (weights @ value.repeat_interleave(group, 0)).transpose(0, 1)


def prepare_attention(
    batch: AttentionBatch, kv_pool: torch.Tensor, scale: float, sliding_window: int | None
) -> ReferenceAttention:
    """Nothing to derive."""
    return ReferenceAttention(batch, kv_pool, scale, sliding_window)
