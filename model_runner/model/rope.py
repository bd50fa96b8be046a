"""Rotary position embedding as config.json describes it, reduced to what the frequencies are computed from.

Some variants name frequencies that depend on a sequence's current length (dynamic, longrope). Here they are fixed when
the model is loaded, at the longest context of the model's own configuration, `max_position_embeddings`: the K of a
block must depend on its tokens alone. A runner's lower `--max-context-length` does not count, so that runners with
different limits have the same fingerprint and share blocks.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model_runner.model.fields import read, read_count, read_number
from pagekeeper.common.errors import ConfigurationError

VARIANTS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class LinearScaling:
    """Every frequency is divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Wavelengths beyond the trained context are stretched by `factor`, short ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class YarnScaling:
    """The same, blended along the dimensions of a head (arXiv 2309.00071)."""

    factor: float
    beta_fast: float
    """A dimension that turns more often over the trained context keeps its frequency."""
    beta_slow: float
    """One that turns less often is stretched by `factor`."""
    truncate: bool
    """Whether the bounds between which is blended are whole dimensions."""
    original_max_position_embeddings: int


@dataclass(frozen=True)
class Divisors:
    """Each frequency is divided by a number of its own (longrope, arXiv 2402.13753)."""

    long: bool
    """Whether the context is longer than the trained one; a GGUF file holds divisors for either case."""
    values: tuple[float, ...] | None
    """[head_dim / 2]; None where the weight file has them."""


Scaling = LinearScaling | Llama3Scaling | YarnScaling | Divisors


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding."""

    theta: float
    """Base of the frequencies."""
    variant: str = "default"
    """Its name in config.json, for people."""
    scaling: Scaling | None = None
    attention_factor: float = 1.0
    """Cosines and sines are multiplied by it."""

    def __str__(self) -> str:
        scaling = {} if self.scaling is None else dataclasses.asdict(self.scaling)
        facts = {"base": self.theta} | scaling | {"attention_factor": self.attention_factor}
        numbers = [f"{name.replace('_', ' ')} {fact:,g}" for name, fact in facts.items() if type(fact) in (int, float)]
        return ", ".join([self.variant, *numbers])


def parse_rope(fields: Mapping[str, Any], head_dim: int, max_positions: int) -> RopeConfig:
    """Read the rotary part of a config.json.

    Args:
        fields: its content.
        head_dim: elements of a head.
        max_positions: the model's longest context, in tokens.

    Raises:
        ConfigurationError: the variant is not supported, or a field of it is missing or wrong.
    """
    rope = _parameters(fields)
    variant = rope.get("rope_type", rope.get("type", "default"))
    theta = read_number(rope if "rope_theta" in rope else fields, "rope_theta", 10000.0, above=1.0)
    match variant:
        case "default":
            return RopeConfig(theta)
        case "linear":
            return RopeConfig(theta, variant, LinearScaling(read_number(rope, "factor")))
        case "dynamic":
            return RopeConfig(_dynamic_theta(theta, rope, head_dim, max_positions), variant)
    # Outside of the rotary part, as some files have it, it comes first.
    source = fields if fields.get("original_max_position_embeddings") is not None else rope
    original = read_count(source, "original_max_position_embeddings", max_positions)
    match variant:
        case "llama3":
            return RopeConfig(theta, variant, _llama3(rope, original))
        case "yarn":
            return _yarn(theta, rope, original, max_positions)
        case "longrope":
            return _longrope(theta, rope, original, head_dim, max_positions)
    raise ConfigurationError(f"model: rope scaling {variant!r} is not supported; supported: {', '.join(VARIANTS)}")


def _parameters(fields: Mapping[str, Any]) -> dict[str, Any]:
    # Newer files have everything in rope_parameters, older ones rope_theta and rope_scaling.
    rope = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ConfigurationError("model: rope_scaling must be an object")
    if any(isinstance(value, dict) for value in rope.values()):
        raise ConfigurationError("model: rope parameters that differ between layers are not supported")
    if any(source.get("partial_rotary_factor") not in (None, 1.0) for source in (fields, rope)):
        raise ConfigurationError("model: partial_rotary_factor is not supported")
    return rope


def _dynamic_theta(theta: float, rope: Mapping[str, Any], head_dim: int, max_positions: int) -> float:
    """The base grows with the ratio of context to trained context; without the latter there is nothing to scale."""
    factor = read_number(rope, "factor")
    ratio = max_positions / read_count(rope, "original_max_position_embeddings", max_positions)
    if ratio <= 1.0:
        return theta
    if head_dim < 4:
        raise ConfigurationError(f"model: dynamic rope scaling is not defined for head_dim {head_dim}")
    return float(theta * (factor * ratio - (factor - 1)) ** (head_dim / (head_dim - 2)))


def _llama3(rope: Mapping[str, Any], original: int) -> Llama3Scaling:
    low = read_number(rope, "low_freq_factor")
    return Llama3Scaling(read_number(rope, "factor"), low, read_number(rope, "high_freq_factor", above=low), original)


def _yarn(theta: float, rope: Mapping[str, Any], original: int, max_positions: int) -> RopeConfig:
    factor = read_number(rope, "factor", max_positions / original)
    scaling = YarnScaling(
        factor,
        read_number(rope, "beta_fast", 32.0),
        read_number(rope, "beta_slow", 1.0),
        read(rope, "truncate", bool, True),
        original,
    )
    default = _mscale(factor)
    if rope.get("mscale") and rope.get("mscale_all_dim"):  # zero stands for nothing
        default = _mscale(factor, read_number(rope, "mscale")) / _mscale(factor, read_number(rope, "mscale_all_dim"))
    return RopeConfig(theta, "yarn", scaling, read_number(rope, "attention_factor", default))


def _mscale(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def _longrope(theta: float, rope: Mapping[str, Any], original: int, head_dim: int, max_positions: int) -> RopeConfig:
    factor = read_number(rope, "factor", max_positions / original)
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1.0 and original > 1 else 1.0
    long = max_positions > original
    values = None
    if "long_factor" in rope or "short_factor" in rope:
        by_length = {name: _divisors(rope, name, head_dim // 2) for name in ("short_factor", "long_factor")}
        values = by_length["long_factor" if long else "short_factor"]
    return RopeConfig(theta, "longrope", Divisors(long, values), read_number(rope, "attention_factor", default))


def _divisors(rope: Mapping[str, Any], name: str, count: int) -> tuple[float, ...]:
    listed: list[Any] = read(rope, name, list)
    if len(listed) != count:
        raise ConfigurationError(f"model: {name} must list {count} numbers, not {len(listed)}")
    return tuple(read_number({name: value}, name) for value in listed)
