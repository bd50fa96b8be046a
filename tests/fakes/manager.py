"""A cache manager of one's own: the real process, in a runtime directory of the test."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc

from pagekeeper.common.sockets import RuntimeDir
from pagekeeper.v1 import admin_pb2, admin_pb2_grpc

START_LIMIT_S = 30.0


class ManagerProcess:
    """`python -m cache_manager`, ready once constructed. Use as a context manager: it is stopped at the end."""

    def __init__(self, runtime_dir: Path, *flags: str) -> None:
        self.runtime_dir = RuntimeDir(runtime_dir)
        descriptor, name = tempfile.mkstemp(suffix=".log", dir=runtime_dir)
        self._log = Path(name)
        with open(descriptor, "wb") as log:  # noqa: PTH123 (it is a descriptor and not a path)
            command = [sys.executable, "-m", "cache_manager", "--runtime-dir", str(runtime_dir)]
            command += ["--admin-listen", "127.0.0.1:0", *flags]
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
            self.process.wait(timeout=START_LIMIT_S)

    def log_lines(self) -> list[dict[str, Any]]:
        """What it has logged so far."""
        return [json.loads(line) for line in self._log.read_text().splitlines() if line.startswith("{")]

    def stats(self) -> admin_pb2.GetStatsResponse:
        return self.admin.GetStats(admin_pb2.GetStatsRequest(), timeout=10)

    def audit(self) -> admin_pb2.AuditResponse:
        return self.admin.Audit(admin_pb2.AuditRequest(), timeout=10)

    def _wait_until_ready(self) -> str:
        deadline = time.monotonic() + START_LIMIT_S
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
