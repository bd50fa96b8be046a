"""The demo, as a person meets it first."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagekeeper.cli.server import Server
from pagekeeper.client import Client, Message

QUESTION = "What is the capital of France?"


@pytest.mark.model
def test_the_demo_prints_the_answer_and_what_the_cache_holds(demo_model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pagekeeper.cli.demo"], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Paris" in done.stdout
    assert "36 of 74 tokens in 2 lookups" in done.stdout  # all of the prompt but its last token, the second time


@pytest.mark.model
def test_the_demo_without_its_model_says_how_to_get_it(tmp_path: Path) -> None:
    environment = os.environ | {"PAGEKEEPER_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "pagekeeper.cli.demo"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )
    assert done.returncode == 1
    assert "pagekeeper model fetch smollm2" in done.stderr


@pytest.mark.model
def test_a_chat_is_asked_through_the_models_own_template(demo_stack: Server) -> None:
    with Client(demo_stack.address) as client:
        answer = client.generate([Message("user", QUESTION)], temperature=0, max_tokens=32)
        assert "".join(delta.text for delta in answer) == "The capital of France is Paris."
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 7
