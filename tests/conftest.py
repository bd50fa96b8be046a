"""Fixtures that every kind of test shares."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

KINDS = ("gpu", "docker", "peer")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever does not say what it needs runs on any machine."""
    for item in items:
        if not any(item.get_closest_marker(kind) for kind in KINDS):
            item.add_marker(pytest.mark.cpu)


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """A directory for Unix sockets: private, and with a path far shorter than pytest's own."""
    path = Path(tempfile.mkdtemp(prefix="pk-"))
    yield path
    shutil.rmtree(path)
