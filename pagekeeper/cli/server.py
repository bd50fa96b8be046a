"""`pagekeeper up` as a child of this program: for the demo, the acceptance run and the tests."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Self

from pagekeeper.cli import child
from pagekeeper.cli.processes import children
from pagekeeper.common.errors import PagekeeperError

_STOP_LIMIT_S = 60.0


class ServerFailedError(PagekeeperError):
    """The server ended before it was ready. `code` is the exit code of `pagekeeper up`."""

    def __init__(self, code: int, log: str) -> None:
        lines = log.strip().splitlines() or ["it left no log"]
        super().__init__(f"the server ended with code {code} before it was ready: {lines[-1]}")
        self.code = code
        self.log = log


class Server:
    """A server on free ports of this machine, which ends with the `with` block, and with this program in any case.

    Start it on a thread that lives as long as it: the kernel ends the server when the thread that spawned it ends.

    Args:
        *flags: of `pagekeeper up`; addresses default to any free port.
        log: where its log goes.
        environment: variables on top of ours.

    Attributes:
        address: of the gateway.
        admin: address of the cache manager's admin port.
        device: where the model runs, cpu or cuda.
        pid: of `pagekeeper up`, whose children are the processes of the server.
    """

    def __init__(self, *flags: str, log: Path, environment: dict[str, str] | None = None) -> None:
        self.log = log
        self._flags = ["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", *flags]
        self._environment = environment or {}
        self.address = self.admin = self.device = ""
        self.pid = 0

    def __enter__(self) -> Self:
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                child.command("pagekeeper", "up", *self._flags),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | self._environment,
                process_group=0,  # Ctrl-C is for us; we stop the server
            )
        self.pid = self._process.pid
        try:
            self._read_ready_line()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def pids(self) -> dict[str, int]:
        """The processes as they are now: pids of cache_manager, model_runner, model_runner_standby and gateway."""
        return children(self.pid)

    def _read_ready_line(self) -> None:
        """Wait for the one line on standard output; `up` itself limits how long that takes."""
        assert self._process.stdout is not None  # noqa: S101 - it was asked for as a pipe
        line = self._process.stdout.readline()
        if not line.startswith("ready"):
            raise ServerFailedError(self._process.wait(_STOP_LIMIT_S), self.log.read_text())
        facts = dict(part.split("=", 1) for part in line.split("  ")[1:])
        self.address, self.admin, self.device = facts["grpc"], facts["admin"], facts["device"]

    def stop(self) -> int:
        """Drain and end the server; returns the exit code of `pagekeeper up`."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(_STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        finally:
            if self._process.stdout is not None:
                self._process.stdout.close()
