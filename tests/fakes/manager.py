"""A cache manager of one's own: the real process, in a runtime directory of the test."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from cache_manager import wire
from cache_manager.client import CacheClient
from kernels.kv_layout import KvLayout
from pagekeeper.common.operations import Operation, StepMessage
from pagekeeper.common.sockets import RuntimeDir
from pagekeeper.v1 import admin_pb2, admin_pb2_grpc, cache_pb2
from tests.fakes.local_cache import FINGERPRINT, TINY_LAYOUT

NUM_BLOCKS = 32
POOL = ("--pool-size", str(NUM_BLOCKS * TINY_LAYOUT.block_bytes))
LIMIT_S = 20.0
_ROOT = Path(__file__).parents[2]


class ManagerProcess:
    """`python -m cache_manager`, ready once constructed. Use as a context manager: it is stopped at the end."""

    def __init__(self, runtime_dir: Path, *flags: str) -> None:
        self.runtime_dir = RuntimeDir(runtime_dir)
        descriptor, name = tempfile.mkstemp(suffix=".log", dir=runtime_dir)
        self._log = Path(name)
        with open(descriptor, "wb") as log:  # noqa: PTH123 (it is a descriptor and not a path)
            command = [sys.executable, "-m", "cache_manager", "--runtime-dir", str(runtime_dir)]
            command += ["--device", "cpu", "--admin-listen", "127.0.0.1:0", *flags]
            self.process = subprocess.Popen(command, stderr=log)
        self.admin_listen = self._wait_until_ready()
        self._channel = grpc.insecure_channel(self.admin_listen)
        self.admin = admin_pb2_grpc.AdminServiceStub(self._channel)

    def __enter__(self) -> "ManagerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(timeout=LIMIT_S)

    def log_lines(self) -> list[dict[str, Any]]:
        """What it has logged so far."""
        return [json.loads(line) for line in self._log.read_text().splitlines() if line.startswith("{")]

    def stats(self) -> admin_pb2.GetStatsResponse:
        return self.admin.GetStats(admin_pb2.GetStatsRequest(), timeout=10)

    def audit(self) -> admin_pb2.AuditResponse:
        return self.admin.Audit(admin_pb2.AuditRequest(), timeout=10)

    def _wait_until_ready(self) -> str:
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            for line in self.log_lines():
                if line["event"] == "ready":
                    return str(line["admin_listen"])
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        self.process.kill()
        self.process.wait()
        raise RuntimeError(f"the cache manager did not become ready: {self._log.read_text()}")


@contextmanager
def runner_process(
    manager: ManagerProcess, *, base: int, num_blocks: int, num_sealed: int
) -> Iterator[subprocess.Popen[str]]:
    """`tests.fakes.cache_runner` in a process of its own, once it has said that it is ready."""
    arguments = [str(manager.runtime_dir.path), str(base), str(num_blocks), str(num_sealed)]
    command = [sys.executable, "-m", "tests.fakes.cache_runner", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=_ROOT) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def connect(manager: ManagerProcess, runner_id: str = "runner", layout: KvLayout = TINY_LAYOUT) -> CacheClient:
    """A real client, in this process."""
    return CacheClient.connect(manager.runtime_dir, runner_id, layout, FINGERPRINT, LIMIT_S)


def message(number: int, *operations: Operation) -> cache_pb2.AttachRequest:
    """A message as it travels, of a runner that has launched nothing."""
    return wire.message_to_proto(StepMessage(number, 0, 0, list(operations)))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
