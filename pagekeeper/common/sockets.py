"""The runtime directory with the internal sockets, and gRPC options that every process uses."""

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from pagekeeper.common.errors import ConfigurationError, UnavailableError

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
_MAX_SOCKET_PATH_BYTES = 100
_LOCK_POLL_SECONDS = 0.01
_LOCK_GLANCE_SECONDS = 0.2

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
]
SERVER_OPTIONS: list[tuple[str, int]] = [
    *CHANNEL_OPTIONS,
    # Two servers on one port would each get half of the clients; a busy port must be an error.
    ("grpc.so_reuseport", 0),
    # A client may ping every 10 s without data and never gets a strike for it.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_metadata_size", 16 * 1024),
]


class RuntimeDir:
    """Names of the internal sockets in one directory that only our user can enter.

    The directory's mode is the access control of every internal link: whoever can open a socket in it is trusted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def cache_socket(self) -> Path:
        """CacheService of the cache manager."""
        return self.path / "cache.sock"

    @property
    def handover_socket(self) -> Path:
        """Where the cache manager hands out session tokens and descriptors."""
        return self.path / "handover.sock"

    def runner_socket(self, name: str) -> Path:
        """RunnerService of the runner called `name`."""
        return self.path / f"runner-{name}.sock"

    def runner_sockets(self) -> list[Path]:
        """Every runner socket that exists now, by name."""
        return sorted(self.path.glob("runner-*.sock"))

    def claim(self, name: str, wait_s: float = 0.0) -> int:
        """Be the only process called `name` here, for as long as this one lives.

        The kernel drops the lock when its holder is gone, so a socket found under it is a dead process's. Nobody gives
        it up before: a gRPC server that stops removes its socket's path, even if that is another process's by then.

        Args:
            name: of the process.
            wait_s: how long to wait for the one that has the name, in seconds.

        Returns:
            The descriptor that holds the lock; to be closed by tests alone.

        Raises:
            ConfigurationError: another process has the name.
        """
        descriptor = self._open_lock(name)
        if _lock_within(descriptor, wait_s):
            return descriptor
        os.close(descriptor)
        raise ConfigurationError(f"runtime_dir: another {name} serves {self.path}")

    @contextlib.contextmanager
    def succession(self, name: str) -> Iterator[None]:
        """Be the only one who is about to take over from the process called `name`; held until its name is claimed.

        Raises:
            UnavailableError: another process is.
        """
        with self._lock_opened(_successor_of(name)) as descriptor:
            if not _lock_within(descriptor, 0.0):
                raise UnavailableError(f"replace: another process takes over from {name} just now")
            yield

    def wait_until_free(self, name: str) -> None:
        """Block until no process is called `name` here, and none is about to take over from one that was."""
        while True:
            with self._lock_opened(name) as holder:
                fcntl.flock(holder, fcntl.LOCK_EX)
                with self._lock_opened(_successor_of(name)) as successor:
                    if _try_lock(successor):
                        return
            with self._lock_opened(_successor_of(name)) as successor:
                fcntl.flock(successor, fcntl.LOCK_EX)

    def _open_lock(self, name: str) -> int:
        return os.open(self.path / f"{name}.lock", os.O_WRONLY | os.O_CREAT, mode=0o600)

    @contextlib.contextmanager
    def _lock_opened(self, name: str) -> Iterator[int]:
        descriptor = self._open_lock(name)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def prepare(self) -> None:
        """Create the directory, mode 0700, or check the one that is there.

        Raises:
            ConfigurationError: it cannot be created, is not ours, is open to others, or its path is too long.
        """
        if len(os.fsencode(self.runner_socket("x" * 16))) > _MAX_SOCKET_PATH_BYTES:
            raise ConfigurationError(f"runtime_dir: {self.path} is too long for a Unix socket; choose a shorter path")
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            info = self.path.stat()
        except OSError as error:
            raise ConfigurationError(f"runtime_dir: cannot create {self.path}: {error.strerror}") from error
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
            raise ConfigurationError(f"runtime_dir: {self.path} must be a directory of this user with mode 0700")
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise ConfigurationError(f"runtime_dir: {self.path} is not writable")


def unix_target(path: Path) -> str:
    """The gRPC target (or address to listen on) of a Unix socket."""
    return f"unix:{path}"


def _successor_of(name: str) -> str:
    return f"{name}.next"


def _lock_within(descriptor: int, seconds: float) -> bool:
    """Whether the lock could be had. It waits a moment in any case: `wait_until_free` holds one to look at it."""
    deadline = time.monotonic() + max(seconds, _LOCK_GLANCE_SECONDS)
    while not _try_lock(descriptor):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOCK_POLL_SECONDS)
    return True


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
