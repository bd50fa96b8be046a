"""Runner processes of one's own, on a tiny model, that start in a fraction of a second."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import grpc

from pagekeeper.common.sockets import RuntimeDir, unix_target
from pagekeeper.v1 import runner_pb2, runner_pb2_grpc

LIMIT_S = 60.0
_ROOT = Path(__file__).parents[2]


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


class RunnerProcess:
    """One of them. It may be ended by any means."""

    def __init__(self, spawner: "RunnerSpawner", pid: int, name: str, runtime_dir: Path, log: Path) -> None:
        self.pid = pid
        self.socket = RuntimeDir(runtime_dir).runner_socket(name)
        self._spawner = spawner
        self._log = log

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait for the end; nothing if it has ended."""
        if self.exit_code() is None:
            self.signal(signal.SIGKILL)
            self.wait()

    def exit_code(self) -> int | None:
        """Negative for a signal; None while it lives."""
        return self._spawner._ask({"pid": self.pid})["code"]

    def wait(self) -> int:
        until(lambda: self.exit_code() is not None)
        code = self.exit_code()
        assert code is not None
        return code

    def wait_until_ready(self) -> Self:
        until(lambda: self.has_logged("ready") or self.exit_code() is not None)
        assert self.has_logged("ready"), self.log()
        return self

    def has_logged(self, event: str) -> bool:
        return any(line["event"] == event for line in self.events())

    def log(self) -> str:
        return self._log.read_text()

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log().splitlines() if line.startswith("{")]

    def errors(self) -> list[str]:
        """What it wrote for people."""
        return [line for line in self.log().splitlines() if not line.startswith("{")]

    def report(self) -> runner_pb2.EngineReport:
        """What its engine does now."""
        ping = runner_pb2.ServeRequest(ping=runner_pb2.Ping(nonce=1))
        with grpc.insecure_channel(unix_target(self.socket)) as channel:
            call = runner_pb2_grpc.RunnerServiceStub(channel).Serve(iter([ping]), timeout=LIMIT_S)
            pongs = [response.pong.engine for response in call if response.HasField("pong")]
        return pongs[0]


class RunnerSpawner:
    """Starts them; all of them end with it.

    Args:
        model: directory of the model that they serve.
    """

    def __init__(self, model: Path) -> None:
        self._model = model
        # What is read when a library is imported; no thread may have been started before a fork.
        environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GRPC_VERBOSITY": "NONE"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.runner_spawner"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            env=os.environ | environment | {"PAGEKEEPER_THREADS": "1"},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    @contextmanager
    def started(self, runtime_dir: Path, *flags: str, name: str = "0", failpoints: str = "") -> Iterator[RunnerProcess]:
        """A runner, which is killed at the end of the block if it lives."""
        process = self.start(runtime_dir, *flags, name=name, failpoints=failpoints)
        try:
            yield process
        finally:
            process.kill()

    def start(self, runtime_dir: Path, *flags: str, name: str = "0", failpoints: str = "") -> RunnerProcess:
        """A runner, which is the caller's to end."""
        descriptor, log = tempfile.mkstemp(prefix=f"runner-{name}-", suffix=".log", dir=runtime_dir)
        os.close(descriptor)
        argv = ["--runtime-dir", str(runtime_dir), "--model", str(self._model), "--device", "cpu", "--name", name]
        pid = self._ask({"argv": [*argv, *flags], "failpoints": failpoints, "log": log})["pid"]
        return RunnerProcess(self, pid, name, runtime_dir, Path(log))

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())
