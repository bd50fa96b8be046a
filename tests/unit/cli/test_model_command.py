"""`pagekeeper model`: what it prints and what its exit code says."""

from pathlib import Path

import gguf
import pytest

from pagekeeper.cli.main import main
from tests.models import tiny_tokenizer, write_tiny_gguf, write_tiny_model


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


def test_inspect_names_rope_scaling_window_and_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    options = {"rope_scaling": scaling, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}
    model = write_tiny_model(tmp_path, "qwen2", **options)
    assert run(monkeypatch, "inspect", str(model)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "tensors: 27 F32" in lines
    assert "sliding window: 8 tokens in 1 of 2 layers" in lines
    assert (
        "rotary positions: yarn, base 10,000, factor 4, beta fast 32, beta slow 1, "
        "original max position embeddings 128, attention factor 1.13863"
    ) in lines


def test_inspect_reads_a_bare_gguf_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    q4 = gguf.GGMLQuantizationType.Q4_0
    file = write_tiny_gguf(tmp_path / "tiny.gguf", model, q4, tokenizer=tiny_tokenizer())
    assert run(monkeypatch, "inspect", str(file)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "tensors: 15 Q4_0, 5 F32" in lines
    assert "rotary positions: default, base 10,000, attention factor 1" in lines
    assert "sliding window: none" in lines
    assert lines[-1] == "can be served"


def test_inspect_says_why_a_model_cannot_be_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf", write_tiny_model(tmp_path / "tiny"))
    assert run(monkeypatch, "inspect", str(file)) == 2
    captured = capsys.readouterr()
    assert "architecture: llama" in captured.out
    assert "tokenizer.ggml.tokens is missing" in captured.err
    assert len(captured.err.splitlines()) == 1
