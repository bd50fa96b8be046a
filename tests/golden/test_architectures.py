"""Tiny random models of every architecture and option against transformers."""

import random
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.select import select_kernels
from model_runner.model.load import load_decoder
from tests.golden.comparison import compare
from tests.golden.paged_run import prefill_in_chunks
from tests.models import round_weights, write_tiny_gguf, write_tiny_model

LENGTHS = [1, 7, 8, 9, 17, 40]


@pytest.mark.parametrize("chunk_size", [1, 5, 64])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_logits_equal_transformers_whatever_the_chunk_size(architecture: str, chunk_size: int, tmp_path: Path) -> None:
    compare(write_tiny_model(tmp_path, architecture), LENGTHS, chunk_size)


def test_case_04_logits_over_cached_blocks_equal_those_computed_with_them(tmp_path: Path) -> None:
    """Case 4: the same prompt cold, then warm: logits within a stated bound."""
    model = load_decoder(write_tiny_model(tmp_path), select_kernels("cpu"))
    prompt = random.Random(4).choices(range(3, 380), k=100)
    (cold,) = prefill_in_chunks(model, [prompt], chunk_size=100)
    # A hit takes whole blocks; what follows them is a step of its own over blocks that were written before.
    (warm,) = prefill_in_chunks(model, [prompt], chunk_size=96)
    assert (cold[-1] - warm[-1]).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("llama", {"tie_word_embeddings": False}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"num_key_value_heads": 1}),
        ("llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8, "hidden_size": 72}),
        ("llama", {"head_dim": 32}),
        ("llama", {"rope_theta": 500.0}),
        ("mistral", {"tie_word_embeddings": True}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    ],
)
def test_options_equal_transformers(architecture: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    compare(write_tiny_model(tmp_path, architecture, **overrides), [9, 40], 16)


@pytest.mark.parametrize("chunk_size", [1, 5, 64])
@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("mistral", {}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}),
        ("qwen2", {"use_sliding_window": False, "max_window_layers": 0}),
        ("qwen2", {"use_sliding_window": True}),
        ("qwen3", {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}),
        ("llama", {}),
    ],
)
def test_case_33_sliding_window_layers_equal_eager_transformers(
    architecture: str, overrides: dict[str, Any], chunk_size: int, tmp_path: Path
) -> None:
    """Case 33: window 8, lengths 7, 8, 9, 17; full-attention layers ignore it."""
    compare(write_tiny_model(tmp_path, architecture, sliding_window=8, **overrides), [7, 8, 9, 17], chunk_size)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_widened_without_rounding(dtype: torch.dtype, tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, "qwen2")
    weights = {name: tensor.to(dtype) for name, tensor in load_file(directory / "model.safetensors").items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    compare(directory, [9, 40], 16)


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        ("F16", "qwen2"),
        ("BF16", "qwen3"),
        ("Q4_0", "llama"),
        ("Q4_1", "qwen3"),
        ("Q5_0", "qwen2"),
        ("Q5_1", "qwen3"),
        ("Q8_0", "llama"),
        ("Q4_K", "llama"),
        ("Q4_K", "qwen2"),
        ("Q5_K", "qwen3"),
        ("Q6_K", "llama"),
    ],
)
def test_a_gguf_type_equals_its_dequantised_weights_in_transformers(
    kind: str, architecture: str, tmp_path: Path
) -> None:
    """The weights are widened by the package gguf, and by us."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}  # a block of a K type has 256 values
    directory = write_tiny_model(tmp_path / "model", architecture, **sizes)
    file = write_tiny_gguf(tmp_path / "model.gguf", directory, gguf.GGMLQuantizationType[kind])
    round_weights(directory, gguf.GGMLQuantizationType[kind])
    compare(directory, [9, 33], 16, ours=file)
