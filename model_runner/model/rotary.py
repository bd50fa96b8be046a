"""Angles of the rotary position embedding."""

import math

import torch

from model_runner.model.rope import Divisors, LinearScaling, Llama3Scaling, RopeConfig, YarnScaling
from model_runner.model.weights.names import ROPE_DIVISORS, ROPE_DIVISORS_LONG, ROPE_DIVISORS_SHORT
from model_runner.model.weights.source import WeightSource
from pagekeeper.common.errors import ConfigurationError

_HOST = torch.device("cpu")


class RotaryEmbedding:
    """Turns positions into the cosines and sines that `PagedAttention.rotate_and_store` applies.

    The frequencies are fixed at load and never depend on a sequence's length, so that K of a block depends on its
    tokens alone.

    Args:
        config: theta and scaling.
        head_dim: elements of a head, even.
        divisors: [head_dim / 2], by which each frequency is divided: what the weight file has instead of `config`.
        device: of the positions. Angles are float32 whatever the model computes in: bfloat16 tells no two neighbouring
            positions beyond 256 apart.

    Raises:
        ConfigurationError: divisors are needed and there are none, or they come on top of another scaling.
    """

    def __init__(
        self,
        config: RopeConfig,
        head_dim: int,
        divisors: torch.Tensor | None = None,
        device: torch.device = _HOST,
    ) -> None:
        frequencies = 1.0 / config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
        self._frequencies = _scale(frequencies, config, divisors).to(device)
        self._attention_factor = config.attention_factor

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and half-negated sines of `positions [tokens]`, each `[tokens, head_dim]`."""
        angles = positions.unsqueeze(1).float() * self._frequencies
        cos, sin = angles.cos() * self._attention_factor, angles.sin() * self._attention_factor
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def take_divisors(weights: WeightSource, config: RopeConfig, head_dim: int) -> torch.Tensor | None:
    """The divisors that a GGUF file holds among its weights, those for the model's context; None if it holds none.

    Raises:
        ConfigurationError: of two sets one is missing.
    """
    if ROPE_DIVISORS in weights:
        return weights.take_exactly(ROPE_DIVISORS, head_dim // 2)
    if ROPE_DIVISORS_LONG not in weights and ROPE_DIVISORS_SHORT not in weights:
        return None
    short, long = (weights.take_exactly(name, head_dim // 2) for name in (ROPE_DIVISORS_SHORT, ROPE_DIVISORS_LONG))
    return long if isinstance(config.scaling, Divisors) and config.scaling.long else short


def _scale(frequencies: torch.Tensor, config: RopeConfig, divisors: torch.Tensor | None) -> torch.Tensor:
    match config.scaling:
        # Converters turn the formula of llama3 into divisors; a config.json beside the file may still have it.
        case None | Llama3Scaling() | Divisors() if divisors is not None:
            return frequencies / divisors
        case _ if divisors is not None:
            raise ConfigurationError(f"model: rope scaling {config.variant} excludes divisors in the weights")
        case LinearScaling(factor):
            return frequencies / factor
        case Llama3Scaling():
            return _scale_llama3(frequencies, config.scaling)
        case YarnScaling():
            return _scale_yarn(frequencies, config.theta, config.scaling)
        case Divisors(_, None):
            raise ConfigurationError("model: long_factor and short_factor are missing")
        case Divisors(_, values):
            return frequencies / torch.tensor(values)
    return frequencies


def _scale_llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def _scale_yarn(frequencies: torch.Tensor, theta: float, scaling: YarnScaling) -> torch.Tensor:
    head_dim = 2 * len(frequencies)

    def dimension(turns: float) -> float:
        """Which dimension turns that often over the trained context."""
        ratio = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(theta))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0.0), min(last, head_dim - 1.0)
    span = last - first or 0.001  # no blending: a step
    stretch = ((torch.arange(len(frequencies)) - first) / span).clamp(0.0, 1.0)
    return stretch * frequencies / scaling.factor + (1 - stretch) * frequencies
