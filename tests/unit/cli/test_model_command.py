"""`pagekeeper model`: what it prints and what its exit code says."""

from pathlib import Path

import pytest

from pagekeeper.cli.main import main
from tests.models import write_tiny_gguf, write_tiny_model


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr("sys.argv", ["pagekeeper", "model", *args])
    with pytest.raises(SystemExit) as exit_:
        main()
    return int(exit_.value.code or 0)


def test_inspect_says_what_a_model_holds_and_that_it_can_be_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "inspect", str(write_tiny_model(tmp_path, "qwen3"))) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "architecture: qwen3" in lines
    assert "heads: 4 of 16, 2 for K and V" in lines
    assert lines[-1] == "can be served"


def test_inspect_says_why_a_model_cannot_be_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf", write_tiny_model(tmp_path / "tiny"))
    assert run(monkeypatch, "inspect", str(file)) == 2
    captured = capsys.readouterr()
    assert "architecture: llama" in captured.out
    assert "tokenizer.json" in captured.err
    assert len(captured.err.splitlines()) == 1
