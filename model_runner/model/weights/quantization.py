"""How the bytes of GGUF's tensor types become numbers.

Source: the structs of ggml, which the package gguf restates; tests compare with that package, bit for bit.
The types ending in _K cut their block of 256 values into sub-blocks of 32 or 16, each with a small scale of its own.
"""

from collections.abc import Callable

import torch

from pagekeeper.common.gguf.tensor_types import TensorType


def widen(tensor_type: TensorType, blocks: torch.Tensor) -> torch.Tensor:
    """Turn bytes, uint8 [blocks, block_bytes], into values, float [blocks, block_values], without rounding."""
    return _WIDEN[tensor_type.name](blocks)


def _reinterpret(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda blocks: blocks.view(dtype)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[:, 2:]).sub_(8).mul_(_half(blocks[:, :2]))


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[:, 4:]).mul_(_half(blocks[:, :2])).add_(_half(blocks[:, 2:4]))


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    values = _nibbles(blocks[:, 6:]).add_(_bits(blocks[:, 2:6]), alpha=16)
    return values.sub_(16).mul_(_half(blocks[:, :2]))


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    values = _nibbles(blocks[:, 8:]).add_(_bits(blocks[:, 4:8]), alpha=16)
    return values.mul_(_half(blocks[:, :2])).add_(_half(blocks[:, 2:4]))


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8) * _half(blocks[:, :2])


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _scale_k(_sub_nibbles(blocks[:, 16:]), blocks)


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    # Bit i of byte j belongs to value j of sub-block i.
    fifth = blocks[:, 16:48].unsqueeze(1) >> torch.arange(8, dtype=torch.uint8).view(8, 1) & 1
    return _scale_k(_sub_nibbles(blocks[:, 48:]) | fifth << 4, blocks)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    count = len(blocks)
    lows = blocks[:, :128].view(count, 2, 1, 64)
    low = torch.cat((lows & 15, lows >> 4), 2).view(count, 16, 16)
    pairs = blocks[:, 128:192].view(count, 2, 1, 32) >> torch.arange(0, 8, 2, dtype=torch.uint8).view(4, 1) & 3
    values = (low | pairs.view(count, 16, 16) << 4).to(torch.int8) - 32
    scales = _half(blocks[:, 208:]) * blocks[:, 192:208].view(torch.int8)
    return (values * scales.unsqueeze(2)).flatten(1)


_WIDEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "F32": _reinterpret(torch.float32),
    "F16": _reinterpret(torch.float16),
    "BF16": _reinterpret(torch.bfloat16),
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


def _half(raw: torch.Tensor) -> torch.Tensor:
    """[blocks, 2] bytes as [blocks, 1] float32."""
    return raw.contiguous().view(torch.float16).float()


def _nibbles(raw: torch.Tensor) -> torch.Tensor:
    """[blocks, n] bytes as [blocks, 2n] float32: all low halves, then all high halves.

    Small whole numbers are exact, and what follows can be done in place: a third of the time that integers take, which
    is most of what loading a model takes.
    """
    middle = raw.shape[1]
    values = torch.empty(len(raw), 2 * middle)
    values[:, :middle] = raw & 15
    values[:, middle:] = raw >> 4
    return values


def _sub_nibbles(raw: torch.Tensor) -> torch.Tensor:
    """[blocks, 128] bytes as [blocks, 8, 32] numbers: of 32 bytes the low halves, then the high ones, and so on."""
    chunks = raw.view(len(raw), 4, 1, 32)
    return torch.cat((chunks & 15, chunks >> 4), 2).view(len(raw), 8, 32)


def _bits(raw: torch.Tensor) -> torch.Tensor:
    """[blocks, n] bytes as [blocks, 8n] bits, lowest first."""
    return (raw.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)


def _scale_k(values: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Scale and shift the sub-blocks, [blocks, 8, 32]. A block begins with two halves and eight pairs of six bits."""
    first, second, rest = blocks[:, 4:16].view(len(blocks), 3, 4).unbind(1)
    scales = torch.cat((first & 63, rest & 15 | first >> 6 << 4), 1) * _half(blocks[:, :2])
    minimums = torch.cat((second & 63, rest >> 4 | second >> 6 << 4), 1) * _half(blocks[:, 2:4])
    return (values * scales.unsqueeze(2) - minimums.unsqueeze(2)).flatten(1)
