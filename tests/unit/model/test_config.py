"""Reading config.json."""

import dataclasses
from typing import Any

import pytest

from model_runner.model.config import parse_config
from model_runner.model.rope import RopeConfig
from pagekeeper.common.errors import ConfigurationError
from tests.models import tiny_config


@pytest.mark.parametrize(
    ("architecture", "qkv_bias", "qk_norm"),
    [("llama", False, False), ("mistral", False, False), ("qwen2", True, False), ("qwen3", False, True)],
)
def test_architectures_differ_in_bias_and_norm(architecture: str, qkv_bias: bool, qk_norm: bool) -> None:
    config = parse_config(tiny_config(architecture))
    assert (config.architecture, config.qkv_bias, config.qk_norm) == (architecture, qkv_bias, qk_norm)
    assert not config.output_bias


def test_attention_bias_of_llama_covers_the_output_too() -> None:
    config = parse_config(tiny_config("llama", attention_bias=True, mlp_bias=True))
    assert config.qkv_bias
    assert config.output_bias
    assert config.mlp_bias


def test_head_dim_and_kv_heads_have_defaults() -> None:
    fields = tiny_config("llama", hidden_size=96)
    del fields["head_dim"], fields["num_key_value_heads"]
    config = parse_config(fields)
    assert (config.head_dim, config.num_kv_heads) == (24, 4)


def test_windows_apply_to_the_layers_the_architecture_says() -> None:
    assert parse_config(tiny_config("llama", sliding_window=8)).sliding_windows == (None, None)
    assert parse_config(tiny_config("mistral", sliding_window=8)).sliding_windows == (8, 8)
    assert parse_config(tiny_config("qwen2", sliding_window=8)).sliding_windows == (None, None)
    late = tiny_config("qwen3", sliding_window=8, use_sliding_window=True, max_window_layers=1)
    assert parse_config(late).sliding_windows == (None, 8)
    named = {"layer_types": ["sliding_attention", "full_attention"]}
    assert parse_config(late | named).sliding_windows == (8, None)


def test_windows_that_the_file_leaves_out_are_those_of_transformers() -> None:
    silent = tiny_config("mistral")
    del silent["sliding_window"]
    assert parse_config(silent).sliding_windows == (4096, 4096)
    deep = tiny_config("qwen2", num_hidden_layers=30, use_sliding_window=True)
    del deep["sliding_window"]
    assert parse_config(deep).sliding_windows == (None,) * 28 + (4096,) * 2


def test_end_tokens_come_from_both_files_without_repetition() -> None:
    config = parse_config(tiny_config("llama", eos_token_id=[2, 5]), {"eos_token_id": [5, 7]})
    assert config.eos_token_ids == (2, 5, 7)
    assert parse_config(tiny_config("llama", eos_token_id=None)).eos_token_ids == ()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None, "model_type": "gemma"}, "gemma"),
        ({"architectures": 5}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"architectures": ["A\nB"]}, "A B"),
        ({"vocab_size": None}, "vocab_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 2**62}, "num_hidden_layers"),
        ({"head_dim": 2**40}, "head_dim"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"eos_token_id": ["2"]}, "eos_token_id"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
    ],
)
def test_what_is_not_supported_is_named_on_one_line(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        parse_config(tiny_config("llama") | fields)
    assert named in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_digest_covers_what_shapes_the_cache_and_nothing_else() -> None:
    config = parse_config(tiny_config("llama"))
    assert dataclasses.replace(config, eos_token_ids=(9,)).digest() == config.digest()
    assert dataclasses.replace(config, rope=RopeConfig(5.0)).digest() != config.digest()
    assert dataclasses.replace(config, rms_norm_epsilon=1e-3).digest() != config.digest()
