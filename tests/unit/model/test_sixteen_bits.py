"""The decoder in 16 bits, and with nothing that lies on the wrong device."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernels import reference
from kernels.interface import AttentionBatch, AttentionParams, PagedAttention
from kernels.kv_pool import KvPool
from model_runner.model.load import LoadedModel, check_fits, load_decoder
from pagekeeper.common.errors import ConfigurationError
from tests.models import write_tiny_gguf, write_tiny_model
from tests.paging import Chunk, PagedPool

RELATIVE_ERROR = {torch.bfloat16: 0.03, torch.float16: 0.004}
"""Of the logits of two layers, each of which rounds some twenty times: about four units in the last place."""


def logits_of(model: LoadedModel, kv_dtype: str = "auto") -> torch.Tensor:
    """Of a prompt in two chunks and one decode, `[tokens, vocab]`."""
    pool = PagedPool(model.kv_layout(8, kv_dtype), 8)
    sequence = pool.open(40)
    token_ids = torch.randint(model.config.vocab_size, (40,), generator=torch.Generator().manual_seed(5))
    found = []
    for start, stop in ((0, 25), (25, 39), (39, 40)):
        rows = torch.arange(stop - start)
        batch = pool.batch([Chunk(sequence, start, stop)])
        tokens = token_ids[start:stop]
        found.append(model.decoder.forward(tokens, torch.arange(start, stop), batch, pool.kv, rows))
    return torch.cat(found)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", RELATIVE_ERROR)
def test_sixteen_bits_come_close_to_float32(architecture: str, dtype: torch.dtype, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "model", architecture)
    exact, rounded = (logits_of(load_decoder(path, reference, kind)) for kind in (torch.float32, dtype))
    assert rounded.dtype is torch.float32
    assert (rounded - exact).norm() / exact.norm() < RELATIVE_ERROR[dtype]


def test_eight_bits_for_k_and_v_come_close_to_float32(tmp_path: Path) -> None:
    model = load_decoder(write_tiny_model(tmp_path / "model"), reference)
    exact, quantised = logits_of(model), logits_of(model, "float8_e4m3fn")
    assert 0 < (quantised - exact).norm() / exact.norm() < 0.1


def test_logits_go_where_they_are_wanted(tmp_path: Path) -> None:
    model = load_decoder(write_tiny_model(tmp_path / "model"), reference, torch.bfloat16)
    pool = PagedPool(model.kv_layout(8), 8)
    batch = pool.batch([Chunk(pool.open(6), 0, 6)])
    inputs = (torch.arange(6), torch.arange(6), batch, pool.kv, torch.tensor([5]))
    place = torch.empty(1, model.config.vocab_size)
    assert model.decoder.forward(*inputs, place) is place
    assert place.equal(model.decoder.forward(*inputs))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "bfloat16"),
        ({"dtype": "float16"}, "float16"),
        ({"dtype": None, "torch_dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
    ],
)
def test_a_model_says_which_16_bits_it_was_made_for(fields: dict[str, Any], expected: str, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    del config["dtype"]
    (path / "config.json").write_text(json.dumps(config | fields))
    model = load_decoder(path, reference)
    assert (model.config.half_dtype, model.compute_dtype) == (expected, "float32")


def test_the_dtype_is_no_part_of_the_configurations_digest(tmp_path: Path) -> None:
    digests = {
        load_decoder(write_tiny_model(tmp_path / kind, dtype=kind), reference).config_digest
        for kind in ("float16", "bfloat16")
    }
    assert len(digests) == 1


def test_k_and_v_are_kept_as_computed_or_as_asked(tmp_path: Path) -> None:
    model = load_decoder(write_tiny_model(tmp_path / "model"), reference, torch.bfloat16)
    assert model.kv_layout(16).dtype == "bfloat16"
    assert model.kv_layout(16, "float8_e4m3fn").dtype == "float8_e4m3fn"


def test_rotary_divisors_of_a_file_are_not_rounded(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model")
    divisors = np.linspace(1.001, 3.003, 8, dtype=np.float32)
    path = write_tiny_gguf(tmp_path / "model.gguf", directory, tensors={"rope_freqs.weight": divisors})
    angles = [
        load_decoder(path, reference, dtype).decoder._rotary.angles(torch.tensor([500]))
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert angles[0][0].equal(angles[1][0])
    assert angles[1][0].dtype is torch.float32


class OnHost:
    """The reference, which alone may make tensors without saying where."""

    def __init__(self) -> None:
        for name in ("add_rms_norm", "copy_blocks", "prepare_linear", "rms_norm", "sample", "silu_mul"):
            setattr(self, name, getattr(reference, name))

    def prepare_attention(self, batch: AttentionBatch, kv_pool: KvPool, params: AttentionParams) -> "OnHost":
        self.attention: PagedAttention = reference.prepare_attention(batch, kv_pool, params)
        return self

    def rotate_and_store(self, *args: Any) -> None:
        with torch.device("cpu"):
            self.attention.rotate_and_store(*args)

    def attend(self, *args: Any) -> torch.Tensor:
        with torch.device("cpu"):
            return self.attention.attend(*args)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_step_makes_no_tensor_without_saying_where(architecture: str, tmp_path: Path) -> None:
    model = load_decoder(write_tiny_model(tmp_path / "model", architecture), OnHost())
    pool = PagedPool(model.kv_layout(8), 8)
    batch = pool.batch([Chunk(pool.open(6), 0, 6)])
    inputs = (torch.arange(6), torch.arange(6), batch, pool.kv, torch.tensor([5]))
    expected = model.decoder.forward(*inputs)
    with torch.device("meta"):  # what has no device is of no use from here on
        found = model.decoder.forward(*inputs)
    assert found.equal(expected)


def test_weights_that_do_not_fit_are_named_with_what_they_take() -> None:
    check_fits(1 << 30, free=1 << 30)
    with pytest.raises(ConfigurationError, match=r"weights take 16\.0 GiB and the GPU has 2\.0 GiB free"):
        check_fits(16 << 30, free=2 << 30)
