"""A bare GGUF file against a directory that holds the files its metadata describes."""

import json
from pathlib import Path

import gguf
import pytest

from gateway.model import load_model
from gateway.text.tokenizer import ChatTurn
from model_runner.model.files import open_model
from model_runner.model.load import check_weights
from pagekeeper.cli.demo_model import write_model_directory
from pagekeeper.common.errors import ConfigurationError
from tests.golden.prompts import PROMPTS
from tests.models import tiny_tokenizer, write_tiny_gguf, write_tiny_model

TEXTS = [*PROMPTS, "", " ", "a <|im_end|> b", "1234567", "\r\n\t  x\u00a0y"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fetched model: its GGUF file, and what the metadata says, written out."""
    path = tmp_path_factory.mktemp("models")
    original = write_tiny_model(path / "original")
    (path / "fetched").mkdir()
    write_tiny_gguf(path / "fetched" / "model.gguf", original, tokenizer=tiny_tokenizer())
    write_model_directory(path / "fetched")
    return path / "fetched"


def compare(directory: Path) -> None:
    fetched, bare = load_model(directory), load_model(directory / "model.gguf")
    assert (fetched.defaults, fetched.end_token_ids) == (bare.defaults, bare.end_token_ids)
    for text in TEXTS:
        assert fetched.tokenizer.encode(text) == bare.tokenizer.encode(text)
        turns = (ChatTurn("system", text), ChatTurn("user", "Hello <|im_end|>"))
        assert fetched.tokenizer.encode_chat(turns) == bare.tokenizer.encode_chat(turns)
        ids = fetched.tokenizer.encode(text)
        assert fetched.tokenizer.decode(ids) == bare.tokenizer.decode(ids)
    assert open_model(directory).config == open_model(directory / "model.gguf").config


def test_a_bare_file_is_the_same_model_as_the_directory_made_of_it(directory: Path) -> None:
    compare(directory)
    assert load_model(directory / "model.gguf").name == "model.gguf"


@pytest.mark.model
def test_the_bare_file_of_the_demo_model_is_the_same_model(demo_model: Path) -> None:
    compare(demo_model)


def test_a_directory_with_nothing_but_the_file_is_the_same_model(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "anything.gguf").write_bytes((directory / "model.gguf").read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    model = load_model(tmp_path)
    assert model.tokenizer.encode(TEXTS[0]) == load_model(directory).tokenizer.encode(TEXTS[0])
    assert model.defaults.temperature == 0.5  # what lies next to the file comes first
    assert model.name == tmp_path.name


def test_a_tokenizer_next_to_a_file_does_not_count_for_the_file_alone(directory: Path, tmp_path: Path) -> None:
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer.json").write_text("{")
    assert load_model(tmp_path / "model.gguf").tokenizer.vocab_size == 384
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json cannot be read"):
        load_model(tmp_path)


def test_every_token_that_ends_something_is_an_end_token(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    file = write_tiny_gguf(
        tmp_path / "x.gguf", model, tokenizer=tiny_tokenizer(), metadata={"/tokenizer.ggml.eot_token_id": 0}
    )
    assert load_model(file).end_token_ids == {0, 2}
    assert open_model(file).config.eos_token_ids == (2, 0)


def test_a_file_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "x.gguf", write_tiny_model(tmp_path / "model"))
    with pytest.raises(ConfigurationError, match=r"tokenizer\.ggml\.tokens is missing"):
        load_model(file)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"rope.scaling.type": "fancy"}, "'fancy'"),
        ({"rope.scaling.type": "yarn", "rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor"),
        ({"rope.scaling.type": "yarn", "rope.scaling.attn_factor": 0.5}, "attn_factor"),
        ({"rope.scaling.type": "longrope"}, "long_factor and short_factor are missing"),
        ({"rope.scaling.factor": "two"}, "factor"),
        ({"attention.sliding_window": 8}, "sliding windows"),
        ({"expert_count": 4}, "experts"),
    ],
)
def test_an_option_that_is_not_supported_is_named(
    metadata: dict[str, str | int | float], named: str, tmp_path: Path
) -> None:
    file = write_tiny_gguf(tmp_path / "x.gguf", write_tiny_model(tmp_path / "model"), metadata=metadata)
    with pytest.raises(ConfigurationError) as raised:
        check_weights(open_model(file))
    assert named in str(raised.value)


def test_an_architecture_that_is_not_supported_is_named_on_one_line(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "un\nknown")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigurationError, match=r"'un\\nknown' is not supported"):
        open_model(tmp_path / "x.gguf")
