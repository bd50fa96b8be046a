"""Rotary position embedding: what config.json says, and the frequencies that follow. tests/golden compares logits."""

import math
from typing import Any

import pytest
import torch

from model_runner.model.rope import Divisors, LinearScaling, RopeConfig, YarnScaling, parse_rope
from model_runner.model.rotary import RotaryEmbedding
from pagekeeper.common.errors import ConfigurationError

HEAD_DIM, MAX_POSITIONS = 8, 512


def parse(max_positions: int = MAX_POSITIONS, **scaling: Any) -> RopeConfig:
    return parse_rope({"rope_theta": 10000.0, "rope_scaling": scaling}, HEAD_DIM, max_positions)


def test_rope_is_read_from_either_spelling() -> None:
    old = parse_rope({"rope_theta": 5e3, "rope_scaling": {"type": "linear", "factor": 2.0}}, HEAD_DIM, MAX_POSITIONS)
    parameters = {"rope_theta": 7e3, "rope_type": "linear", "factor": 4}
    new = parse_rope({"rope_parameters": parameters}, HEAD_DIM, MAX_POSITIONS)
    assert old == RopeConfig(5000.0, "linear", LinearScaling(2.0))
    assert new == RopeConfig(7000.0, "linear", LinearScaling(4.0))


def test_dynamic_scaling_is_fixed_at_the_models_longest_context() -> None:
    unscaled = parse(rope_type="dynamic", factor=2.0)
    assert unscaled == RopeConfig(10000.0, "dynamic")
    scaled = parse(rope_type="dynamic", factor=2.0, original_max_position_embeddings=128)
    assert scaled.theta == pytest.approx(10000.0 * (2.0 * 4 - 1) ** (8 / 6))


def test_longrope_takes_the_divisors_for_the_models_longest_context() -> None:
    factors = {"short_factor": [1.0, 1.0, 1.0, 1.0], "long_factor": [1, 2, 3, 4]}
    long = parse(rope_type="longrope", original_max_position_embeddings=128, **factors)
    assert long.scaling == Divisors(True, (1.0, 2.0, 3.0, 4.0))
    assert long.attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(128)))
    short = parse(128, rope_type="longrope", original_max_position_embeddings=128, **factors)
    assert (short.scaling, short.attention_factor) == (Divisors(False, (1.0,) * 4), 1.0)


def test_a_trained_context_outside_of_the_rotary_part_comes_first() -> None:
    fields = {
        "original_max_position_embeddings": 64,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128},
    }
    scaling = parse_rope(fields, HEAD_DIM, MAX_POSITIONS).scaling
    assert isinstance(scaling, YarnScaling)
    assert scaling.original_max_position_embeddings == 64


def test_yarn_fills_in_what_is_not_said() -> None:
    config = parse(rope_type="yarn", original_max_position_embeddings=128)
    assert config.scaling == YarnScaling(4.0, 32.0, 1.0, True, 128)
    assert config.attention_factor == pytest.approx(0.1 * math.log(4) + 1)


def test_the_attention_factor_scales_cosines_and_sines() -> None:
    positions = torch.arange(5)
    plain = RotaryEmbedding(RopeConfig(100.0), HEAD_DIM).angles(positions)
    scaled = RotaryEmbedding(RopeConfig(100.0, attention_factor=1.5), HEAD_DIM).angles(positions)
    for ours, expected in zip(scaled, plain, strict=True):
        torch.testing.assert_close(ours, 1.5 * expected)


def test_divisors_of_the_weights_take_the_place_of_llama3_and_exclude_others() -> None:
    divisors = torch.full((HEAD_DIM // 2,), 2.0)
    llama3 = parse(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    ours = RotaryEmbedding(llama3, HEAD_DIM, divisors).angles(torch.arange(5))
    expected = RotaryEmbedding(parse(rope_type="linear", factor=2.0), HEAD_DIM).angles(torch.arange(5))
    torch.testing.assert_close(ours, expected)
    with pytest.raises(ConfigurationError, match="linear excludes divisors"):
        RotaryEmbedding(parse(rope_type="linear", factor=2.0), HEAD_DIM, divisors)
    with pytest.raises(ConfigurationError, match="long_factor and short_factor are missing"):
        RotaryEmbedding(parse(rope_type="longrope"), HEAD_DIM)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_theta": 1.0}, "rope_theta"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"full_attention": {"rope_type": "linear"}}}, "differ between layers"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "'mrope' is not supported; supported: default, linear"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 10**400}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 1e300}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_slow": 1e-300}}, "beta_slow"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": "no"}}, "truncate"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 1, "mscale_all_dim": -14}}, "mscale_all_dim"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}},
            "4",
        ),
        ({"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0] * 4}}, "short_factor"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 4}}, "4 numbers"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [0] * 4, "long_factor": [1.0] * 4}},
            "short_factor",
        ),
    ],
)
def test_what_is_wrong_is_named_on_one_line(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        parse_rope(fields, HEAD_DIM, MAX_POSITIONS)
    assert named in str(raised.value)
    assert "\n" not in str(raised.value)
