"""The acceptance table cannot pass by leaving something out."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from bench.accept import PROMISES, attempt, main
from bench.promise import Outcome, Promise, Workbench
from bench.promises import setup


def test_a_measurement_that_breaks_is_a_failed_row() -> None:
    def breaks(bench: Workbench) -> Outcome:
        raise OSError("no such thing")

    outcome = attempt(Promise("it works", breaks), Workbench(Path()), Console(quiet=True))
    assert not outcome.passed
    assert outcome.figure == "OSError: no such thing"


def test_promises_that_were_not_run_are_failed_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["accept", "--only", "a promise that does not exist"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert f"0 of {len(PROMISES)} promises kept" in capsys.readouterr().out


def test_no_two_promises_have_the_same_name() -> None:
    assert len({promise.name for promise in PROMISES}) == len(PROMISES)


def test_the_rows_have_kernels_compiled_whatever_helpers_of_tests_they_use() -> None:
    """Else `make test` as a row fails: the compile check refuses to be interpreted."""
    program = "import os, bench.accept; print(os.environ.get('TRITON_INTERPRET'))"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None"]


@pytest.mark.parametrize("measure", [setup.tests_pass, setup.containers_serve])
def test_a_make_that_fails_after_its_tests_says_what_failed(
    measure: Callable[[Workbench], Outcome], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    output = "E  assert 1\nFAILED tests/test_x.py::test_y\n== 1 failed, 3 passed in 2.00s ==\nrefused\nmake: Error 2\n"
    monkeypatch.setattr(setup, "run", lambda *_: (2.0, output, 2))
    outcome = measure(Workbench(Path()))
    assert not outcome.passed
    told, _, log = outcome.figure.partition("; all of it in ")
    assert told.endswith("exit 2: 1 failed, 3 passed in 2.00s; FAILED tests/test_x.py::test_y; refused; make: Error 2")
    assert Path(log).read_text() == output
