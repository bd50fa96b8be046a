"""GGUF's tensor types: how many values share how many bytes.

A quantised row is a sequence of blocks (the format's own word; nothing to do with the KV cache).
Source: the structs of ggml, which the package gguf restates; tests compare with that package.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorType:
    """A way to store values."""

    name: str
    block_values: int
    block_bytes: int


TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    30: TensorType("BF16", 1, 2),
}
"""Supported types by their number in the file."""
