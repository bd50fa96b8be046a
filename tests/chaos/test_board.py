"""Nothing that was not run, or could not be, passes for a good score."""

import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from rich.console import Console

from bench.chaos.__main__ import Board, main
from bench.chaos.campaign import Campaign, Setting, run
from bench.chaos.faults import Plan, Signal
from bench.promise import Outcome


def chaos(*args: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "bench.chaos", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_a_name_that_no_campaign_has_is_a_failure(tiny_model: Path) -> None:
    done = chaos("--full", "--only", "kilt", "--model", str(tiny_model))
    assert done.returncode == 1
    assert "'kilt' in its name; there are: runner killed" in done.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--kills", "0"], "less than 1"),
        (["--streams", "-1"], "less than 1"),
        (["--full", "--share", "0"], "not above 0"),
        (["--model", "/nowhere"], "there is no /nowhere"),
        (["--read", "/nowhere.json"], "is no scoreboard"),
    ],
)
def test_what_makes_no_sense_is_refused(
    args: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["chaos", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_what_cannot_be_run_is_a_failed_row() -> None:
    board = Board(Namespace(json=None), Console())
    board.add("impossible", lambda: Outcome(str(1 / 0), "", True))
    assert board.rows[0].cells[-1] == "FAIL"
    assert "ZeroDivisionError" in board.rows[0].complaints[0]


def test_a_server_that_does_not_start_is_a_complaint(setting: Setting) -> None:
    campaign = Campaign("nobody", Plan((("runner", Signal.KILL),), 1), standby=False)
    lame = Setting(setting.model, setting.reference, setting.prompts, "no size", setting.environment, setting.folder)
    report = run(campaign, lame, seed=1, tell=print)
    assert "before it was ready" in report.complaints()[0]
