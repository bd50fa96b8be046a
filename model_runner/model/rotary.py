"""Angles of the rotary position embedding."""

import math

import torch

from model_runner.model.config import RopeConfig


class RotaryEmbedding:
    """Turns positions into the cosines and sines that `Kernels.rotary` applies.

    The frequencies are fixed at load and never depend on a sequence's length, so that K of a block depends on its
    tokens alone.

    Args:
        config: theta and scaling.
        head_dim: elements of a head, even.
        factors: [head_dim / 2], by which a GGUF file divides each frequency.
    """

    def __init__(self, config: RopeConfig, head_dim: int, factors: torch.Tensor | None = None) -> None:
        frequencies = 1.0 / config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
        self._frequencies = _scale(frequencies, config) if factors is None else frequencies / factors

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and half-negated sines of `positions [tokens]`, each `[tokens, head_dim]`."""
        angles = positions.unsqueeze(1).float() * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def _scale(frequencies: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    if config.variant == "linear":
        return frequencies / config.factor
    if config.variant == "llama3":
        # Wavelengths beyond the trained context are stretched by factor, short ones kept, those between blended.
        turns = config.original_max_position_embeddings * frequencies / (2 * math.pi)
        span = config.high_freq_factor - config.low_freq_factor
        keep = ((turns - config.low_freq_factor) / span).clamp(0.0, 1.0)
        return keep * frequencies + (1 - keep) * frequencies / config.factor
    return frequencies
