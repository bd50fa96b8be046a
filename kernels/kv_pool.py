"""The pool's bytes seen as tensors."""

from dataclasses import dataclass
from typing import Self

import torch

from kernels.kv_layout import KvLayout


@dataclass(frozen=True)
class KvPool:
    """Three views of the same bytes. Neighbouring blocks are `raw.stride(0)` bytes apart in each of them."""

    raw: torch.Tensor
    """[num_blocks, block_bytes] uint8."""
    blocks: torch.Tensor
    """[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim] of the layout's dtype; a block is contiguous."""
    scales: torch.Tensor | None
    """[num_blocks, num_layers, 2, num_kv_heads, block_size] float32, of a quantised pool."""

    @classmethod
    def over(cls, memory: torch.Tensor, layout: KvLayout, num_blocks: int) -> Self:
        """View `memory`, uint8 and contiguous, as `num_blocks` blocks; what is left over at its end is not used."""
        raw = memory[: num_blocks * layout.block_bytes].view(num_blocks, layout.block_bytes)
        blocks = raw[:, : layout.data_bytes].view(getattr(torch, layout.dtype))
        scales = None
        if layout.scale_shape is not None:
            scales = raw[:, layout.data_bytes :].view(torch.float32).unflatten(1, layout.scale_shape)
        return cls(raw, blocks.unflatten(1, layout.block_shape), scales)

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self.blocks.shape[4]
