"""Random models of real shapes are what their figures say, and rates are taken from the right time."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.gpu_check.load import Reading
from bench.gpu_check.random_model import LLAMA_1B, LLAMA_8B, TINY, ModelShape, write
from bench.gpu_check.serving import steady
from kernels import reference
from model_runner.model.load import load_decoder


@pytest.mark.parametrize("shape", [TINY, replace(TINY, tied_head=False, dtype="float32")])
def test_a_random_model_loads_and_has_the_bytes_it_says(tmp_path: Path, shape: ModelShape) -> None:
    loaded = load_decoder(write(shape, tmp_path / "model", seed=1), reference)
    assert loaded.num_parameters * shape.item_bytes == shape.weight_bytes
    layout = loaded.kv_layout(16)
    assert layout.block_bytes // 16 * shape.item_bytes // 4 == shape.kv_bytes_a_token


def test_the_same_seed_gives_the_same_model(tmp_path: Path) -> None:
    digests = [
        load_decoder(write(TINY, tmp_path / str(i), seed), reference).weights_digest for i, seed in enumerate((1, 1, 2))
    ]
    assert digests[0] == digests[1] != digests[2]


def test_no_two_rows_are_alike(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    path = write(TINY, tmp_path / "model", seed=1)
    weights = {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    embedding = weights["model.embed_tokens.weight"]
    assert len(torch.unique(embedding, dim=0)) == TINY.vocab_size
    assert 0.9 < float(embedding.float().std()) < 1.1


def test_the_shapes_are_those_of_llama() -> None:
    assert LLAMA_8B.weight_bytes == 2 * 8_030_261_248
    assert LLAMA_1B.weight_bytes == 2 * 1_235_814_400
    assert LLAMA_8B.kv_bytes_a_token == 128 << 10
    assert LLAMA_8B.bytes_read_a_step == LLAMA_8B.weight_bytes - 2 * 128_256 * 4096
    assert LLAMA_1B.bytes_read_a_step == LLAMA_1B.weight_bytes


def test_the_rate_is_of_the_time_in_which_all_decode() -> None:
    early = Reading(0.0, [1.0, 2.0, 3.0, 4.0, 5.0], cached_tokens=0)
    late = Reading(0.0, [3.0, 4.0, 5.0, 6.0, 7.0], cached_tokens=0)
    rate, length = steady([early, late])
    assert rate == 2.0  # from 3 to 5, two of each
    assert length == 256 + (3 + 5 + 1 + 3) / 4
    with pytest.raises(RuntimeError, match="ask for more tokens"):
        steady([early, Reading(0.0, [6.0, 7.0], cached_tokens=0)])
