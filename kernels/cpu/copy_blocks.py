"""Copying blocks inside the pool."""

import torch

from kernels.kv_pool import KvPool


def copy_blocks(kv_pool: KvPool, copies: torch.Tensor) -> None:
    """Copy whole blocks; each is one contiguous range, so each copy is a memcpy (0.7 MB for SmolLM2)."""
    for source, destination in copies.tolist():
        kv_pool.raw[destination].copy_(kv_pool.raw[source])
