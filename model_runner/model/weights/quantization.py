"""GGUF's tensor types: how their bytes become numbers.

A quantised row is a sequence of blocks of 32 values (the format's own word; nothing to do with the KV cache).
Source: the structs of ggml, which the package gguf restates; tests compare with that package.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TensorType:
    """A way to store values."""

    name: str
    block_values: int
    block_bytes: int
    widen: Callable[[torch.Tensor], torch.Tensor]
    """Turns bytes, uint8 [blocks, block_bytes], into values, float [blocks, block_values]."""


def _reinterpret(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda blocks: blocks.view(dtype)


def _widen_q8_0(blocks: torch.Tensor) -> torch.Tensor:
    scale = blocks[:, :2].contiguous().view(torch.float16).float()
    return blocks[:, 2:].view(torch.int8) * scale


def _widen_q4_1(blocks: torch.Tensor) -> torch.Tensor:
    scale, minimum = blocks[:, :4].contiguous().view(torch.float16).float().unsqueeze(-1).unbind(1)
    nibbles = blocks[:, 4:]
    values = torch.cat((nibbles & 15, nibbles >> 4), 1)  # the low halves hold the first 16 values
    return torch.addcmul(minimum, values, scale)


TENSOR_TYPES = {
    0: TensorType("F32", 1, 4, _reinterpret(torch.float32)),
    1: TensorType("F16", 1, 2, _reinterpret(torch.float16)),
    3: TensorType("Q4_1", 32, 20, _widen_q4_1),
    8: TensorType("Q8_0", 32, 34, _widen_q8_0),
    30: TensorType("BF16", 1, 2, _reinterpret(torch.bfloat16)),
}
"""Supported types by their number in the file."""
