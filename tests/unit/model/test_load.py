"""Loading models: every tensor once, every parameter filled, the same model from either format."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.kv_layout import KvLayout
from kernels.select import select_kernels
from model_runner.model.files import open_model
from model_runner.model.load import LoadedModel, check_weights, load_decoder
from pagekeeper.common.errors import ConfigurationError
from tests.models import write_tiny_gguf, write_tiny_model
from tests.paging import Chunk, PagedPool

Weights = dict[str, torch.Tensor]


def load(path: Path) -> LoadedModel:
    return load_decoder(path, select_kernels("cpu"))


def prefill(model: LoadedModel, tokens: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a random prompt, and its K and V, `[layers, 2, kv_heads, tokens, head_dim]`."""
    pool = PagedPool(model.kv_layout(8), 8)
    chunk = Chunk(pool.open(tokens), 0, tokens)
    token_ids = torch.randint(model.config.vocab_size, (tokens,), generator=torch.Generator().manual_seed(5))
    rows = torch.arange(tokens)
    logits = model.decoder.forward(token_ids, rows, pool.batch([chunk]), pool.kv, rows)
    blocks = pool.kv.blocks[pool.tables[0]]
    return logits, blocks.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)[:, :, :, :tokens]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_case_31_gguf_and_safetensors_give_the_same_layers(
    architecture: str, num_kv_heads: int, tmp_path: Path
) -> None:
    """Case 31: q/k row order with grouped-query attention; K, V and logits of every layer have cosine > 0.9999."""
    directory = write_tiny_model(
        tmp_path / "model", architecture, num_key_value_heads=num_kv_heads, attention_bias=architecture == "llama"
    )
    ours = prefill(load(write_tiny_gguf(tmp_path / "model.gguf", directory)))
    theirs = prefill(load(directory))
    for layer in range(2):
        cosine = torch.cosine_similarity(ours[1][layer].flatten(), theirs[1][layer].flatten(), dim=0)
        assert cosine > 0.9999
    assert torch.cosine_similarity(ours[0], theirs[0], dim=-1).min() > 0.9999
    torch.testing.assert_close(ours[0], theirs[0])


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_every_gguf_type_loads(kind: str, tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model", "qwen3")
    file = write_tiny_gguf(tmp_path / "model.gguf", directory, gguf.GGMLQuantizationType[kind])
    logits, expected = prefill(load(file))[0], prefill(load(directory))[0]
    bound = 0.9 if kind == "Q4_1" else 0.999
    assert torch.cosine_similarity(logits, expected, dim=-1).mean() > bound


def rewrite(directory: Path, change: Callable[[Weights], None]) -> Path:
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("verify", [load, lambda path: check_weights(open_model(path))], ids=["load", "check"])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda w: w.pop("model.layers.1.mlp.up_proj.weight"), "model.layers.1.mlp.up_proj.weight is missing"),
        (lambda w: w.update(extra=torch.ones(1)), "no place for tensors extra"),
        (lambda w: w.update({"model.norm.weight": torch.ones(3)}), r"model.norm.weight has shape \[3\]"),
        (lambda w: w.update({f"x{i}": torch.ones(1) for i in range(9)}), "x0, x1, x2, x3, x4 and 4 more"),
    ],
)
def test_case_32_no_tensor_is_dropped_and_no_parameter_left_empty(
    change: Callable[[Weights], None], named: str, verify: Callable[[Path], object], tmp_path: Path
) -> None:
    """Case 32: each tensor is consumed exactly once, each parameter filled, else an error naming them."""
    directory = rewrite(write_tiny_model(tmp_path), change)
    with pytest.raises(ConfigurationError, match=named):
        verify(directory)


def test_a_gguf_tensor_without_a_place_is_named(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model", "qwen2")
    config = json.loads((directory / "config.json").read_text()) | {"model_type": "qwen3"}
    (directory / "config.json").write_text(json.dumps(config))
    file = write_tiny_gguf(tmp_path / "model.gguf", directory)
    with pytest.raises(ConfigurationError, match=r"q_norm.weight is missing"):
        load(file)


def test_a_copy_of_a_tied_head_is_taken_if_it_is_one(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, "llama")
    expected = prefill(load(directory))[0]
    rewrite(directory, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    assert torch.equal(prefill(load(directory))[0], expected)
    check_weights(open_model(directory))
    rewrite(directory, lambda w: w.update({"lm_head.weight": w["lm_head.weight"] + 1}))
    with pytest.raises(ConfigurationError, match="tied"):
        load(directory)


def test_shards_are_one_model_and_share_no_tensor(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path)
    expected = prefill(load(directory))[0]
    weights = load_file(directory / "model.safetensors")
    names = sorted(weights)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, held in shards.items():
        save_file({name: weights[name] for name in held}, directory / shard)
    index = {"weight_map": {name: shard for shard, held in shards.items() for name in held}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(prefill(load(directory))[0], expected)
    (directory / "model.safetensors.index.json").unlink()
    with pytest.raises(ConfigurationError, match="there twice"):
        load(directory)


def test_an_index_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path)
    index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigurationError, match="same directory"):
        load(directory)


def test_digests_follow_content_and_not_place(tmp_path: Path) -> None:
    first = load(write_tiny_model(tmp_path / "a"))
    moved = load(shutil.copytree(tmp_path / "a", tmp_path / "b"))
    other = load(write_tiny_model(tmp_path / "c", seed=1))
    assert (first.weights_digest, first.config_digest) == (moved.weights_digest, moved.config_digest)
    assert first.weights_digest != other.weights_digest
    assert first.config_digest == other.config_digest
    assert len(first.weights_digest) == len(first.config_digest) == 32


def test_the_layout_is_the_models(tmp_path: Path) -> None:
    assert load(write_tiny_model(tmp_path)).kv_layout(16) == KvLayout(2, 2, 16, 16, "float32")


@pytest.mark.parametrize(
    ("prepare", "named"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.mkdir(), "neither .safetensors nor .gguf"),
        (lambda path: [write_tiny_model(path), (path / "config.json").unlink()], "config.json"),
        (lambda path: [write_tiny_model(path), (path / "config.json").write_text("{")], "config.json"),
        (lambda path: [write_tiny_model(path), (path / "config.json").write_text("[]")], "JSON object"),
        (lambda path: path.write_text("hello"), "not a GGUF file"),
    ],
)
def test_what_is_no_model_is_an_error_of_one_line(
    prepare: Callable[[Path], object], named: str, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    prepare(path)
    with pytest.raises(ConfigurationError, match=named) as raised:
        load(path)
    assert "\n" not in str(raised.value)
