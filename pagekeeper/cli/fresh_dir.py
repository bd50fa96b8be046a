"""A runtime directory of one's own, for as long as one lives.

Its lock is on the directory itself. The kernel drops it when its holder dies, so that whoever comes next can tell what
a killed one has left behind, and removes it.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pagekeeper.common.errors import ConfigurationError

# Not that of the directory which single processes use by default: nobody locks that.
_PREFIX = "pagekeeper-up-"


@contextlib.contextmanager
def fresh_runtime_dir() -> Iterator[Path]:
    """A new directory with a path short enough for sockets, mode 0700, removed at the end.

    Raises:
        ConfigurationError: no directory can be made, or none can be locked.
    """
    parent = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    for path in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), _locked(path):
            if path.stat().st_uid == os.getuid():
                shutil.rmtree(path)
    with contextlib.ExitStack() as stack:
        try:
            path = _make_locked(parent, stack)
        except OSError as error:
            raise ConfigurationError(f"runtime_dir: cannot make one in {parent}: {error.strerror}") from error
        stack.callback(shutil.rmtree, path, ignore_errors=True)
        yield path


def _make_locked(parent: Path, stack: contextlib.ExitStack) -> Path:
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        # Before it is locked, it looks left behind, and somebody may have it locked or removed.
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            stack.enter_context(_locked(path))
            return path


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a directory.

    Raises:
        OSError: somebody else holds it, it is gone, or it cannot be opened or locked.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.stat()  # it may have been removed before the lock was ours
        yield
    finally:
        os.close(descriptor)
