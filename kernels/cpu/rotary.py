"""Rotary position embedding in place."""

import torch


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate `x [tokens, heads, head_dim]` in place; `cos` and the half-negated `sin` are `[tokens, head_dim]`."""
    rolled = x.roll(x.shape[-1] // 2, -1)
    x.mul_(cos.unsqueeze(1)).addcmul_(rolled, sin.unsqueeze(1))
