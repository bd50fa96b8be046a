"""What a kernel backend offers, and the batch it works on.

A backend is a module with the functions of `Kernels`: `kernels.reference` is the specification, every other one must
match it up to the order of float summation. The KV pool they work on is a tensor over shared memory,
`[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`, contiguous (see `kernels.kv_layout`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class AttentionBatch:
    """Where the tokens of one step live in the pool. Sequences with one new token (decode) come first.

    All tensors are int64 and live on the device of the pool. Valid for one step.
    """

    slot_mapping: torch.Tensor
    """[tokens]: slot that each new token's K and V go to."""
    block_tables: torch.Tensor
    """[sequences, max_blocks]: block ids, padded with the null block."""
    query_lengths: list[int]
    """New tokens of each sequence; their sum is `tokens`. Host side."""
    context_lengths: list[int]
    """Tokens of each sequence whose K and V exist once this step's are stored, new ones included. Host side."""
    num_decodes: int
    """The first so many sequences have exactly one new token."""


class Linear(Protocol):
    """A linear layer whose weights a backend has arranged for itself."""

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """`x [tokens, in] @ weight.T + bias + residual [tokens, out]`, as a new tensor `[tokens, out]`."""
        ...


class PagedAttention(Protocol):
    """Causal attention of one step's tokens over their sequences' paged context; valid for that step."""

    def store(self, layer: int, key_value: torch.Tensor) -> None:
        """Write K and V of the new tokens, `[tokens, 2, num_kv_heads, head_dim]`, into their slots of the pool."""
        ...

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Attention of `query [tokens, num_heads, head_dim]`, to be called after `store`.

        Returns a new tensor of the same shape. A token sees its own sequence's tokens up to itself, of those the
        last `sliding_window` if that is set. What unused slots hold, NaN included, has no influence on a single bit.
        """
        ...


class Kernels(Protocol):
    """The operations of the model. Tensors live on one device; nothing is kept between calls."""

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Arrange `weight [out, in]` and `bias [out]` once, at load; the arguments are not needed afterwards."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """`x / sqrt(mean(x²) + epsilon) * weight` over the last dimension; `weight` may broadcast over heads."""
        ...

    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotate `x [tokens, heads, head_dim]` in place: `x * cos + x rolled by half of head_dim * sin`.

        `cos` and `sin` are `[tokens, head_dim]`; the first half of `sin` is negated. Pairs are (i, i + head_dim / 2).
        """
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up` of `gate_up [tokens, 2 * size]`, gate first, as a new tensor `[tokens, size]`."""
        ...

    def prepare_attention(
        self, batch: AttentionBatch, kv_pool: torch.Tensor, scale: float, sliding_window: int | None
    ) -> PagedAttention:
        """Derive once a step what every layer's attention needs."""
        ...

    def copy_blocks(self, kv_pool: torch.Tensor, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy whole blocks inside the pool, one after the other in the given order."""
        ...
