"""Fixtures of tests with real processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.runner_process import RunnerSpawner


@pytest.fixture(scope="session")
def spawner(tiny_model: Path) -> Iterator[RunnerSpawner]:
    """Starts runner processes on the tiny model."""
    with RunnerSpawner(tiny_model) as started:
        yield started
