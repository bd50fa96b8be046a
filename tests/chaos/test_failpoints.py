"""At each failpoint a real process dies once while streams run, and the streams go on as if nothing had been."""

import pytest

from bench.chaos import failpoints
from bench.chaos.campaign import Setting
from bench.chaos.faults import Signal
from bench.chaos.report import Report
from pagekeeper.common.failpoints import NAMES
from tests.chaos.conftest import NUM_SLOTS

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def report(setting: Setting) -> Report:
    """Of one pass over all of them, with the same streams from the first to the last."""
    return failpoints.run([Signal.KILL], setting, NUM_SLOTS, seed=1, tell=print)


@pytest.mark.parametrize("name", NAMES)
def test_the_process_that_comes_there_dies(report: Report, name: str) -> None:
    assert report.faults.get(f"kill {name}") == 1, report.broken


def test_no_stream_loses_or_doubles_or_changes_a_token_and_nothing_is_left(report: Report) -> None:
    assert report.complaints() == []
