"""Root mean square normalisation (Zhang and Sennrich, arXiv 1910.07467)."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """`x / sqrt(mean(x²) + epsilon) * weight` over the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Add `x` to `residual` in place; the norm of the sum, all `[tokens, hidden_size]`."""
    residual += x
    return rms_norm(residual, weight, epsilon)
