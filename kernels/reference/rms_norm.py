"""Root mean square normalisation (Zhang and Sennrich, arXiv 1910.07467)."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """`x / sqrt(mean(x²) + epsilon) * weight` over the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight
