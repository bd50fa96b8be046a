"""Copying blocks inside the pool."""

from collections.abc import Sequence

import torch


def copy_blocks(kv_pool: torch.Tensor, sources: Sequence[int], destinations: Sequence[int]) -> None:
    """Copy whole blocks, in order; a block is one contiguous range, so each is one copy."""
    for source, destination in zip(sources, destinations, strict=True):
        kv_pool[destination].copy_(kv_pool[source])
