"""Attention over a paged context: decodes and prefills of one step, each by a kernel of its own."""

from dataclasses import dataclass

import torch

from kernels.interface import AttentionBatch, AttentionParams
from kernels.kv_pool import KvPool
from kernels.triton.decode_attention import attend_decodes, find_device
from kernels.triton.prefill_attention import attend_prefills
from kernels.triton.rotary import rotate_and_store_kv
from kernels.triton.tuning import padded_dim

_FP8_CAPABILITY = 89
"""The first that converts float8_e4m3fn."""


@dataclass(frozen=True)
class TritonAttention:
    """One step's attention. Launches and waits for nothing, so decodes can be captured in a CUDA graph."""

    batch: AttentionBatch
    kv_pool: KvPool
    params: AttentionParams

    def rotate_and_store(self, layer: int, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotate Q and K of `qkv [tokens, num_heads + 2 * num_kv_heads, head_dim]`, write K and V into their slots."""
        rotate_and_store_kv(qkv, cos, sin, self.batch.slot_mapping, self.kv_pool, layer)

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Attention of `query [tokens, num_heads, head_dim]`."""
        out = query.new_empty(query.shape)
        attend_decodes(out, query, self.kv_pool, layer, self.batch, self.params)
        attend_prefills(out, query, self.kv_pool, layer, self.batch, self.params)
        return out


def prepare_attention(batch: AttentionBatch, kv_pool: KvPool, params: AttentionParams) -> TritonAttention:
    """Check that there are kernels; what a step needs is looked up on the device.

    Raises:
        ValueError: head_dim is not a multiple of 16 up to 256, or the pool is quantised and the device cannot convert
            float8_e4m3fn.
    """
    padded_dim(kv_pool.blocks.shape[5])
    capability = find_device(kv_pool.blocks.device).capability
    if kv_pool.scales is not None and capability < _FP8_CAPABILITY:
        raise ValueError(
            f"kernels 'triton' keep K and V in float8_e4m3fn from compute capability 8.9 on; this device has "
            f"{capability // 10}.{capability % 10}"
        )
    return TritonAttention(batch, kv_pool, params)
