"""Tiny random models of every architecture and option against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kernels.select import select_kernels
from model_runner.model.load import load_decoder
from tests.golden.paged_run import prefill_in_chunks
from tests.models import write_tiny_model

BOUND = 2e-3
LENGTHS = [1, 7, 8, 9, 17, 40]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "factor": 2.0}


def compare(path: Path, lengths: list[int], chunk_size: int) -> None:
    """Our logits, computed in chunks through the paged pool, against eager attention over each prompt at once."""
    generator = torch.Generator().manual_seed(len(lengths))
    prompts = [torch.randint(384, (length,), generator=generator).tolist() for length in lengths]
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    ours = prefill_in_chunks(load_decoder(path, select_kernels("cpu")), prompts, chunk_size)
    for prompt, logits in zip(prompts, ours, strict=True):
        with torch.inference_mode():
            expected = theirs(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(logits, expected, rtol=0, atol=BOUND)
        assert expected.std() > 0.5, "a model this flat would agree with anything"


@pytest.mark.parametrize("chunk_size", [1, 5, 64])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_logits_equal_transformers_whatever_the_chunk_size(architecture: str, chunk_size: int, tmp_path: Path) -> None:
    compare(write_tiny_model(tmp_path, architecture), LENGTHS, chunk_size)


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("llama", {"tie_word_embeddings": False}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"num_key_value_heads": 1}),
        ("llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8, "hidden_size": 72}),
        ("llama", {"head_dim": 32}),
        ("llama", {"rope_theta": 500.0}),
        ("llama", {"rope_scaling": LLAMA3}),
        ("llama", {"rope_scaling": LINEAR}),
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
        ("qwen3", {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}),
    ],
)
def test_case_33_sliding_window_layers_equal_eager_transformers(
    architecture: str, overrides: dict[str, Any], chunk_size: int, tmp_path: Path
) -> None:
    """Case 33: window 8, lengths 7, 8, 9, 17; full-attention layers ignore it."""
    compare(write_tiny_model(tmp_path, architecture, sliding_window=8, **overrides), [7, 8, 9, 17], chunk_size)
