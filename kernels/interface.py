"""What a kernel backend offers, and the batch it works on."""

from dataclasses import dataclass

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
