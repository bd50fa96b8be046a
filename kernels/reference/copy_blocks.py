"""Copying blocks inside the pool."""

import torch

from kernels.kv_pool import KvPool


def copy_blocks(kv_pool: KvPool, copies: torch.Tensor) -> None:
    """Copy whole blocks, `copies [n, 2]` of (source, destination); a block is one contiguous range."""
    for source, destination in copies.tolist():
        kv_pool.raw[destination].copy_(kv_pool.raw[source])
