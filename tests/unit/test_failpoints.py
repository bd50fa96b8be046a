"""Failpoints: written in the environment, counted, and dead in every build but a test build."""

import os
import signal
import subprocess
import sys

import pytest

from pagekeeper.common.errors import BugError, ConfigurationError
from pagekeeper.common.failpoints import NAMES, VARIABLE, Failpoints

_PASSES = """
import sys
from importlib import metadata
if sys.argv[1] == "wheel":
    metadata.PathDistribution.read_text = lambda self, name: '{"archive_info": {}}'
from pagekeeper.common.failpoints import failpoint
for number in range(1, 5):
    print(number, flush=True)
    failpoint("runner.before_seal")
"""


def _run(build: str, points: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _PASSES, build],
        env=os.environ | {VARIABLE: points},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_process_dies_at_the_pass_that_was_asked_for() -> None:
    """The third pass is the last; what another point is told does not matter here."""
    ended = _run("editable", "runner.before_seal=kill@3;runner.after_emit=kill")
    assert (ended.returncode, ended.stdout.split()) == (-signal.SIGKILL, ["1", "2", "3"])


def test_an_installed_wheel_ignores_the_environment() -> None:
    """Nobody's server may die of a variable."""
    ended = _run("wheel", "runner.before_seal=kill")
    assert (ended.returncode, ended.stdout.split()) == (0, ["1", "2", "3", "4"])


def test_a_point_can_fail() -> None:
    """As whatever is called there might."""
    with pytest.raises(BugError, match=r"runner\.mid_copy"):
        Failpoints("runner.mid_copy=fail").reach("runner.mid_copy")


def test_a_point_can_wait_once() -> None:
    """Sleeping is for races; the passes before and after do nothing."""
    points = Failpoints("manager.after_apply=sleep:0.01@2")
    for _ in range(3):
        points.reach("manager.after_apply")


@pytest.mark.parametrize(
    "text",
    ["nowhere=kill", "runner.mid_copy", "runner.mid_copy=maim", "runner.mid_copy=kill@x", "runner.mid_copy=sleep:"],
)
def test_a_wrong_failpoint_is_named(text: str) -> None:
    """A chaos run whose failpoints never fire would prove nothing."""
    with pytest.raises(ConfigurationError, match=VARIABLE):
        Failpoints(text)


def test_every_name_says_whose_it_is() -> None:
    """Process, then place; no two the same."""
    assert len(set(NAMES)) == len(NAMES)
    assert {name.partition(".")[0] for name in NAMES} == {"runner", "manager", "gateway"}
