"""Folders for what is large, in memory where there is room. Standard library alone.

Their names begin with the run's seed, so that what a killed process has left behind can be found and removed.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.gpu_check.task import NotRunError

_ROOM = 64 << 20


def _places() -> list[Path]:
    return [Path("/dev/shm"), Path(tempfile.gettempdir())]  # noqa: S108 - what is made there is private


@contextlib.contextmanager
def scratch_folder(seed: int, num_bytes: int) -> Iterator[Path]:
    """A private folder with room for so much, removed at the end.

    Raises:
        NotRunError: there is no room.
    """
    for place in _places():
        if place.is_dir() and shutil.disk_usage(place).free > num_bytes + _ROOM:
            folder = Path(tempfile.mkdtemp(prefix=f"pk-{seed}-", dir=place))
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            return
    places = " nor ".join(map(str, _places()))
    raise NotRunError(f"neither {places} has room for {num_bytes / 1e9:.1f} GB")


def remove_leftovers(seed: int) -> None:
    """Remove what processes of the run with this seed have not removed themselves."""
    for place in _places():
        for folder in place.glob(f"pk-{seed}-*"):
            shutil.rmtree(folder, ignore_errors=True)
