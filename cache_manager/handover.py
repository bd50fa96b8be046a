"""The hand-over socket: what a gRPC stream cannot carry.

A runner connects before it attaches and sends its own pidfd; the manager checks that it runs as our user, and answers
with a secret session token and the descriptors of the pool. Both keep the connection open for life. Its end is the
proof of death: the kernel closes it only when every thread of the runner has stopped, so nobody writes any more.

Work that the runner has queued on a device is another matter. A runner that ends in good order waits for it and says
GOODBYE; of any other one the manager keeps the pidfd.

Bytes on it, of a stream socket: the runner sends HELLO with one descriptor, the manager answers with TOKEN_BYTES and
the pool's descriptors. GOODBYE counts when it is the last that the runner sends. Whatever else it sends is discarded.
"""

import asyncio
import contextlib
import os
import secrets
import socket
import struct
from pathlib import Path
from typing import Protocol

import structlog

from pagekeeper.common.errors import ConfigurationError

HELLO = b"pagekeeper-handover-1\n"
GOODBYE = b"pagekeeper-goodbye\n"
TOKEN_BYTES = 32

_HANDSHAKE_SECONDS = 5.0
_MAX_CONNECTIONS = 64
_MAX_DESCRIPTORS = 4
_ACCEPT_PAUSE_SECONDS = 1.0
_INT = struct.Struct("i")
_CREDENTIALS = struct.Struct("3i")  # struct ucred of unix(7): pid, uid, gid

_log = structlog.get_logger()


class RunnerConnection:
    """One runner, from its connection to its death. Closed by the `HandoverServer` only."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.token = b""
        """Empty until the handshake is done."""
        self.pid, self.uid, _ = _CREDENTIALS.unpack(
            sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        self._hello = b""
        self._last_said = b""
        self._pidfd = -1

    @property
    def said_goodbye(self) -> bool:
        """The runner has let go of the pool in good order: nothing of it writes any more, on no device."""
        return self._last_said == GOODBYE

    def read_hello(self) -> bool:
        """Take what has arrived of the handshake; whether it is complete.

        Raises:
            ValueError: this is not how a runner begins.
            OSError: the connection is gone.
        """
        data, descriptors = _receive(self.socket, len(HELLO) - len(self._hello))
        self._keep_pidfd(descriptors)
        self._hello += data
        if not data or not HELLO.startswith(self._hello):
            raise ValueError("not a hello")
        if self._hello != HELLO:
            return False
        if self._pidfd < 0:
            raise ValueError("a hello without a pidfd")
        return True

    def listen(self) -> bool:
        """Take what has arrived since the handshake; False at the connection's end.

        Raises:
            OSError: the connection is gone.
        """
        data = self.socket.recv(4096)
        self._last_said = (self._last_said + data)[-len(GOODBYE) :]
        return bool(data)

    def take_pidfd(self) -> int:
        """The runner's pidfd, the caller's to close: readable once the process has ended, a little after this has."""
        pidfd, self._pidfd = self._pidfd, -1
        return pidfd

    def close(self) -> None:
        """Close the descriptors."""
        self.socket.close()
        if self._pidfd >= 0:
            os.close(self.take_pidfd())

    def _keep_pidfd(self, descriptors: list[int]) -> None:
        for descriptor in descriptors:
            if self._pidfd < 0 and _is_pidfd(descriptor):
                self._pidfd = descriptor
            else:
                os.close(descriptor)


class Runners(Protocol):
    """Who wants to know which runners live."""

    def descriptors_for(self, connection: RunnerConnection) -> list[int]:
        """What this runner needs to map the pool. Called once, before `runner_connected`; they stay the callee's."""
        ...

    def runner_connected(self, connection: RunnerConnection) -> None:
        """A runner has its token and may attach."""
        ...

    def runner_ended(self, connection: RunnerConnection) -> None:
        """No thread of that process writes any more. Called once for each `runner_connected`.

        The connection's descriptors are closed when this returns, but for the pidfd if it was taken.
        """
        ...


class HandoverServer:
    """The manager's end, in its event loop.

    Args:
        path: of the socket.
        runners: gives each runner its descriptors, and is told of every one that comes or ends.
    """

    def __init__(self, path: Path, runners: Runners) -> None:
        self._path = path
        self._runners = runners
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._connections: set[RunnerConnection] = set()

    def start(self) -> None:
        """Listen. A socket that is already there is a dead manager's: who starts this holds the directory's lock.

        Raises:
            ConfigurationError: the socket cannot be made.
        """
        try:
            self._path.unlink(missing_ok=True)
            self._listener.bind(str(self._path))
        except OSError as error:
            raise ConfigurationError(f"runtime_dir: cannot serve {self._path}: {error.strerror}") from error
        self._listener.listen(_MAX_CONNECTIONS)
        self._resume_accepting()

    def close(self) -> None:
        """Stop listening and drop every connection; runners see the end of theirs."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener)
        self._listener.close()
        for connection in list(self._connections):
            self._drop(connection)
        self._path.unlink(missing_ok=True)

    def _resume_accepting(self) -> None:
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            # Out of descriptors: the listener stays readable, so trying again at once would spin.
            _log.warning("cannot accept a runner", error=error.strerror)
            loop.remove_reader(self._listener)
            loop.call_later(_ACCEPT_PAUSE_SECONDS, self._resume_accepting)
            return
        sock.setblocking(False)
        connection = RunnerConnection(sock)
        if connection.uid != os.getuid() or len(self._connections) >= _MAX_CONNECTIONS:
            _log.warning("refused a connection", uid=connection.uid, pid=connection.pid, open=len(self._connections))
            connection.close()
            return
        self._connections.add(connection)
        loop.add_reader(sock, self._read, connection)
        loop.call_later(_HANDSHAKE_SECONDS, self._expire, connection)

    def _expire(self, connection: RunnerConnection) -> None:
        if not connection.token and connection in self._connections:
            _log.warning("dropped a connection that did not say hello in time", pid=connection.pid)
            self._drop(connection)

    def _read(self, connection: RunnerConnection) -> None:
        try:
            if connection.token:
                if not connection.listen():
                    self._end(connection)
            elif connection.read_hello():
                self._welcome(connection)
        except BlockingIOError:
            return
        except (OSError, ValueError) as error:
            if connection.token:
                self._end(connection)
            else:
                _log.warning("dropped a connection during its handshake", pid=connection.pid, reason=str(error))
                self._drop(connection)

    def _welcome(self, connection: RunnerConnection) -> None:
        token = secrets.token_bytes(TOKEN_BYTES)
        socket.send_fds(connection.socket, [token], self._runners.descriptors_for(connection))
        connection.token = token
        self._runners.runner_connected(connection)

    def _end(self, connection: RunnerConnection) -> None:
        self._forget(connection)
        try:
            self._runners.runner_ended(connection)
        finally:
            connection.close()

    def _drop(self, connection: RunnerConnection) -> None:
        self._forget(connection)
        connection.close()

    def _forget(self, connection: RunnerConnection) -> None:
        asyncio.get_running_loop().remove_reader(connection.socket)
        self._connections.discard(connection)


class HandoverClient:
    """The runner's end. Attributes: `token` and `descriptors`, which are the caller's to close.

    Raises:
        OSError: no manager listens, it did not answer in time, or it closed the connection.
    """

    def __init__(self, path: Path, timeout_s: float) -> None:
        """Connect and shake hands within `timeout_s` seconds."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.token = b""
        self.descriptors: list[int] = []
        try:
            self._socket.settimeout(timeout_s)
            self._socket.connect(str(path))
            self._shake_hands()
            self._socket.settimeout(None)
        except BaseException:
            self._socket.close()
            for descriptor in self.descriptors:
                os.close(descriptor)
            raise

    def wait_for_end(self) -> None:
        """Block until the manager is gone or `close` is called by another thread."""
        with contextlib.suppress(OSError):
            while self._socket.recv(4096):
                pass

    def close(self) -> None:
        """Tell the manager that this runner writes no more: no step of it is in flight, on no device. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.send(GOODBYE, socket.MSG_DONTWAIT)
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _shake_hands(self) -> None:
        pidfd = os.pidfd_open(os.getpid())
        try:
            socket.send_fds(self._socket, [HELLO], [pidfd])
        finally:
            os.close(pidfd)
        while len(self.token) < TOKEN_BYTES:
            data, descriptors = _receive(self._socket, TOKEN_BYTES - len(self.token))
            self.descriptors += descriptors
            if not data:
                raise ConnectionResetError("the cache manager closed the hand-over connection")
            self.token += data


def _receive(sock: socket.socket, size: int) -> tuple[bytes, list[int]]:
    """At most `size` bytes and the descriptors that came with them, close-on-exec from the start.

    `socket.recv_fds` of Python 3.11 takes flags and ignores them.
    """
    space = socket.CMSG_LEN(_MAX_DESCRIPTORS * _INT.size)
    data, ancillary, _, _ = sock.recvmsg(size, space, socket.MSG_CMSG_CLOEXEC)
    descriptors: list[int] = []
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            whole = payload[: len(payload) - len(payload) % _INT.size]
            descriptors += [descriptor for (descriptor,) in _INT.iter_unpack(whole)]
    return data, descriptors


def _is_pidfd(descriptor: int) -> bool:
    info = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
    return any(line.startswith("Pid:") for line in info.splitlines())
