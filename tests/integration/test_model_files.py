"""Models as files, through real processes: a bare GGUF file is served whole, a damaged model is one line."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagekeeper.cli.demo_model import write_model_directory
from pagekeeper.cli.server import Server
from pagekeeper.client import Client, Message
from tests.models import tiny_tokenizer, write_tiny_gguf, write_tiny_model

LIMIT_S = 60.0
StartServer = Callable[..., Server]


def answers(server: Server) -> list[list[int]]:
    """Token ids of an answer to a text and of one to a chat."""
    with Client(server.address) as client:
        prompts = ("The quick brown fox", [Message("user", "What is the capital of France?")])
        return [
            [token for delta in client.generate(prompt, temperature=0, max_tokens=12) for token in delta.token_ids]
            for prompt in prompts
        ]


def test_a_bare_gguf_file_answers_as_the_directory_made_of_it(start_server: StartServer, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_tiny_gguf(file, write_tiny_model(tmp_path / "original"), tokenizer=tiny_tokenizer())
    fetched = tmp_path / "fetched"
    fetched.mkdir()
    (fetched / "model.gguf").hardlink_to(file)
    write_model_directory(fetched)
    first, second = (answers(start_server("--pool-size", "4MiB", model=model)) for model in (file, fetched))
    assert first == second
    assert [len(tokens) for tokens in first] == [12, 12]


@pytest.mark.model
def test_the_bare_file_of_the_demo_model_answers_as_its_directory(
    demo_stack: Server, demo_model: Path, start_server: StartServer
) -> None:
    bare = start_server("--pool-size", "512MiB", model=demo_model / "model.gguf")
    assert answers(bare) == answers(demo_stack)


def cut_off(directory: Path) -> Path:
    file = write_tiny_gguf(directory / "cut.gguf", write_tiny_model(directory / "model"), tokenizer=tiny_tokenizer())
    os.truncate(file, file.stat().st_size - 1)
    return file


def cut_off_in_the_header(directory: Path) -> Path:
    os.truncate(cut_off(directory), 1000)
    return directory / "cut.gguf"


def change_tensors(directory: Path, **tensors: torch.Tensor) -> Path:
    weights = load_file(write_tiny_model(directory) / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights | tensors, directory / "model.safetensors")
    return directory


def with_a_missing_tensor(directory: Path) -> Path:
    return change_tensors(directory)


def with_an_extra_tensor(directory: Path) -> Path:
    return change_tensors(directory, **{"model.norm.weight": torch.ones(64), "extra": torch.ones(1)})


def with_an_index_that_leads_elsewhere(directory: Path) -> Path:
    index = '{"weight_map": {"model.norm.weight": "../model.safetensors"}}'
    (write_tiny_model(directory) / "model.safetensors.index.json").write_text(index)
    return directory


def run(module: str, model: Path, runtime_dir: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, "--model", str(model), "--runtime-dir", str(runtime_dir)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.mark.parametrize(
    ("module", "damage", "named"),
    [
        ("model_runner", cut_off, "ends after the file"),
        ("model_runner", with_a_missing_tensor, "model.norm.weight is missing"),
        ("model_runner", with_an_extra_tensor, "no place for tensors extra"),
        ("model_runner", with_an_index_that_leads_elsewhere, "files of the same directory"),
        ("gateway", cut_off_in_the_header, "ends after the file"),
    ],
)
def test_a_damaged_model_ends_the_process_with_one_line_and_exit_code_2(
    module: str, damage: Callable[[Path], Path], named: str, runtime_dir: Path, tmp_path: Path
) -> None:
    done = run(module, damage(tmp_path), runtime_dir)
    assert done.returncode == 2
    assert named in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
