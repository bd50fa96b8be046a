"""Starting and asking `peer.py` processes."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from bench.gpu_check.peer import MESSAGE_BYTES
from bench.gpu_check.task import NotRunError, Setting

_ANSWER_S = 30.0
_UNSHARE = ["unshare", "--pid", "--fork", "--kill-child"]


class PeerError(Exception):
    """What a peer could not do; the text is its error."""


@dataclass(frozen=True)
class Death:
    """What was seen of a killed process, in seconds after the kill."""

    killed_at: float
    """time.monotonic() of the kill."""
    socket_s: float
    """End of a connection that it held, as of the hand-over connection."""
    pidfd_s: float


class PeerProcess:
    """A peer; killed with its `with` block.

    Args:
        setting: whether it works on a device.
        own_pid_namespace: it gets one.
    """

    def __init__(self, setting: Setting, *, own_pid_namespace: bool = False) -> None:
        self._cuda = not setting.dry_run
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "bench.gpu_check.peer", str(theirs.fileno())]
        self._process = subprocess.Popen(
            _UNSHARE * own_pid_namespace + command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def begin(self) -> int:
        """Wait until it can work; returns its pid as it sees it."""
        return int(self.ask("begin", cuda=self._cuda))

    def send(self, command: str, descriptors: Sequence[int] = (), **arguments: Any) -> None:  # noqa: ANN401 - JSON
        """Ask, and `receive` the answer later."""
        socket.send_fds(self._connection, [json.dumps({"command": command} | arguments).encode()], list(descriptors))

    def receive(self, timeout_s: float = _ANSWER_S) -> tuple[Any, list[int]]:
        """The answer to the oldest question, and descriptors that came with it, the caller's to close.

        Raises:
            PeerError: it failed, or the process is gone.
            TimeoutError: no answer came.
        """
        self._connection.settimeout(timeout_s)
        data, descriptors, _, _ = socket.recv_fds(self._connection, MESSAGE_BYTES, 8)
        if not data:
            raise PeerError("the process is gone")
        answer = json.loads(data)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer["value"], descriptors

    def ask(self, command: str, descriptors: Sequence[int] = (), **arguments: Any) -> Any:  # noqa: ANN401 - JSON
        """Ask and wait for the answer; raises as `receive` does."""
        self.send(command, descriptors, **arguments)
        return self.receive()[0]

    def kill(self) -> Death:
        """SIGKILL, and wait for both signs of its end."""
        pidfd = os.pidfd_open(self._process.pid)
        try:
            began = time.monotonic()
            os.kill(self._process.pid, signal.SIGKILL)
            ended: dict[int, float] = {}
            waiting = {pidfd, self._connection.fileno()}
            while waiting:
                readable, _, _ = select.select(waiting, [], [], _ANSWER_S)
                if not readable:
                    raise TimeoutError(f"a killed process was still there after {_ANSWER_S:g} s")
                now = time.monotonic() - began
                ended |= dict.fromkeys(readable, now)
                waiting -= set(readable)
        finally:
            os.close(pidfd)
        self._process.wait()
        return Death(began, ended[self._connection.fileno()], ended[pidfd])


def can_unshare() -> None:
    """Check that a process may be given a PID namespace of its own.

    Raises:
        NotRunError: it may not here.
    """
    try:
        done = subprocess.run([*_UNSHARE, "true"], capture_output=True, text=True, timeout=10, check=False)
    except OSError as error:
        raise NotRunError(f"unshare cannot be run: {error}") from error
    if done.returncode:
        raise NotRunError(f"a PID namespace is not permitted here: {done.stderr.strip()}")
