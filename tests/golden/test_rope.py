"""Every way of scaling rotary positions, on every architecture and from either format, against transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.golden.comparison import compare
from tests.models import CLASSES, write_tiny_gguf, write_tiny_model

TRAINED, CONTEXT = 16, 48
LINEAR = {"rope_type": "linear", "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": TRAINED,
}
YARN = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": TRAINED}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0],
    "original_max_position_embeddings": TRAINED,
}


def write(path: Path, architecture: str, scaling: dict[str, Any], **overrides: Any) -> Path:
    overrides = {"max_position_embeddings": CONTEXT, "rope_theta": 500.0} | overrides
    return write_tiny_model(path, architecture, rope_scaling=scaling, **overrides)


@pytest.mark.parametrize("architecture", CLASSES)
@pytest.mark.parametrize("scaling", [LINEAR, LLAMA3, YARN], ids=lambda scaling: scaling["rope_type"])
def test_what_does_not_depend_on_the_length_is_equal_at_any(
    scaling: dict[str, Any], architecture: str, tmp_path: Path
) -> None:
    compare(write(tmp_path, architecture, scaling), [7, 33, CONTEXT], 16)


@pytest.mark.parametrize("architecture", CLASSES)
def test_longrope_is_equal_beyond_the_trained_context(architecture: str, tmp_path: Path) -> None:
    compare(write(tmp_path, architecture, LONGROPE), [TRAINED + 1, 33, CONTEXT], 16)


def test_longrope_is_equal_at_any_length_where_no_context_is_beyond_the_trained_one(tmp_path: Path) -> None:
    scaling = LONGROPE | {"original_max_position_embeddings": CONTEXT}
    compare(write(tmp_path, "llama", scaling), [7, 33, CONTEXT], 16)


@pytest.mark.parametrize("architecture", CLASSES)
def test_dynamic_scaling_is_equal_at_the_longest_context(architecture: str, tmp_path: Path) -> None:
    """transformers calls the trained context max_position_embeddings, and reaches our frequencies at our longest."""
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    path = write(tmp_path, architecture, scaling | {"original_max_position_embeddings": TRAINED})
    theirs = scaling | {"rope_theta": 500.0}
    compare(path, [CONTEXT], 16, max_position_embeddings=TRAINED, rope_parameters=theirs)


def test_dynamic_scaling_without_a_trained_context_is_equal_up_to_the_longest(tmp_path: Path) -> None:
    compare(write(tmp_path, "llama", {"rope_type": "dynamic", "factor": 2.0}), [7, 33, CONTEXT], 16)


@pytest.mark.parametrize(
    "scaling",
    [
        YARN | {"attention_factor": 1.3},
        YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
        YARN | {"beta_fast": 4.0, "beta_slow": 0.5, "truncate": False},
        YARN | {"beta_fast": 1.0, "beta_slow": 1.0},
        LONGROPE | {"attention_factor": 1.2},
        LONGROPE | {"factor": 5.0},
        LLAMA3 | {"low_freq_factor": 0.2, "high_freq_factor": 1.0},
    ],
)
def test_options_of_a_scaling_are_equal(scaling: dict[str, Any], tmp_path: Path) -> None:
    compare(write(tmp_path, "llama", scaling), [33, CONTEXT], 16)


def test_decoding_one_by_one_equals_computing_at_once(tmp_path: Path) -> None:
    compare(write(tmp_path, "qwen2", YARN), [CONTEXT], 1)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("scaling", "metadata"),
    [
        (LINEAR, {"type": "linear", "factor": 2.0}),
        (LINEAR, {"factor": 2.0}),
        (YARN, {"type": "yarn", "factor": 3.0, "original_context_length": TRAINED}),
        (
            YARN | {"beta_fast": 4.0, "beta_slow": 0.5},
            {
                "type": "yarn",
                "factor": 3.0,
                "original_context_length": TRAINED,
                "yarn_beta_fast": 4.0,
                "yarn_beta_slow": 0.5,
            },
        ),
    ],
)
def test_gguf_metadata_means_the_same(
    scaling: dict[str, Any], metadata: dict[str, Any], architecture: str, tmp_path: Path
) -> None:
    directory = write(tmp_path / "model", architecture, scaling)
    entries = {f"rope.scaling.{name}": value for name, value in metadata.items()}
    compare(directory, [33], 16, ours=write_tiny_gguf(tmp_path / "model.gguf", directory, metadata=entries))


def test_gguf_has_the_divisors_of_longrope_as_tensors(tmp_path: Path) -> None:
    directory = write(tmp_path / "model", "llama", LONGROPE | {"attention_factor": 1.2})
    file = write_tiny_gguf(
        tmp_path / "model.gguf",
        directory,
        metadata={
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": TRAINED,
            "rope.scaling.attn_factor": 1.2,
        },
        tensors={f"rope_factors_{kind}.weight": np.array(LONGROPE[f"{kind}_factor"]) for kind in ("long", "short")},
    )
    compare(directory, [33], 16, ours=file)


def test_gguf_has_the_formula_of_llama3_as_a_tensor(tmp_path: Path) -> None:
    """The file alone, and in a directory whose config.json has the formula as well."""
    reference, served = (write(tmp_path / name, "llama", LLAMA3) for name in ("reference", "served"))
    (served / "model.safetensors").unlink()
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.from_pretrained(reference), torch.device("cpu"))
    unscaled = 500.0 ** (-torch.arange(0, 16, 2) / 16)
    divisors = {"rope_freqs.weight": (unscaled / frequencies).numpy()}
    file = write_tiny_gguf(served / "model.gguf", reference, tensors=divisors)
    compare(reference, [33], 16, ours=file)
    compare(reference, [33], 16, ours=served)
