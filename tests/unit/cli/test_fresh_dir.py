"""Directories that live as long as their process, and those that a killed one has left behind."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pagekeeper.cli.fresh_dir import fresh_runtime_dir
from pagekeeper.common.errors import ConfigurationError


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_a_fresh_directory_is_private_and_removed_with_what_is_in_it(parent: Path) -> None:
    with fresh_runtime_dir() as path:
        assert path.parent == parent
        assert path.stat().st_mode & 0o777 == 0o700
        (path / "runner-0.lock").touch()
    assert not list(parent.iterdir())


def test_what_a_killed_process_left_behind_is_removed_and_nothing_else(parent: Path) -> None:
    program = (
        "import os, signal; from pagekeeper.cli.fresh_dir import fresh_runtime_dir\n"
        "with fresh_runtime_dir() as path: (path / 'cache.sock').touch(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
    (left_behind,) = parent.iterdir()
    others = {parent / "pagekeeper", parent / "pagekeeper-1000"}
    for other in others:
        other.mkdir()
    with fresh_runtime_dir() as first, fresh_runtime_dir() as second:
        assert set(parent.iterdir()) == others | {first, second}
        assert left_behind not in (first, second)


def test_the_body_s_errors_are_its_own(parent: Path) -> None:
    with pytest.raises(BlockingIOError), fresh_runtime_dir():
        raise BlockingIOError
    assert not list(parent.iterdir())


def test_no_place_for_a_directory_is_one_line(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(parent / "missing"))
    with pytest.raises(ConfigurationError, match=r"runtime_dir: cannot make one in .*missing"), fresh_runtime_dir():
        raise AssertionError("there is none")
