"""Rotary position embedding (Su et al., arXiv 2104.09864), pairs half a head apart."""

import torch


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate `x [tokens, heads, head_dim]` in place; `cos` and the half-negated `sin` are `[tokens, head_dim]`."""
    rolled = x.roll(x.shape[-1] // 2, -1)
    x.copy_(x * cos.unsqueeze(1) + rolled * sin.unsqueeze(1))
