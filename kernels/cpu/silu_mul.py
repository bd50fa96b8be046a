"""The gated activation of the feed-forward layer."""

import torch
import torch.nn.functional as F


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of `gate_up [tokens, 2 * size]`, gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
