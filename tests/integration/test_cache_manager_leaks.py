"""A thousand requests that end in every way, through the real processes, leave nothing behind."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pagekeeper.cli.server import Server
from tests import leaks


@pytest.mark.timeout(600)  # what does not go on is noticed by itself; all of it may take long on a busy machine
def test_a_thousand_requests_that_end_in_every_way_leave_nothing_behind(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    ends = leaks.check_that_nothing_leaks(start_server("--pool-size", "2MiB", **leaks.environment(tmp_path)), tmp_path)
    assert ends.total() == leaks.NUM_REQUESTS
    assert min(ends.values()) > 20
