"""The runner's own health service, which containers ask: it has no port, only its socket."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from pagekeeper.cli.server import Server
from pagekeeper.client import Client
from pagekeeper.common.sockets import RuntimeDir, unix_target

LIMIT_S = 30.0


def test_a_runner_is_serving_until_it_drains(start_server: Callable[..., Server], runtime_dir: Path) -> None:
    server = start_server("--runtime-dir", str(runtime_dir))
    socket = unix_target(RuntimeDir(runtime_dir).runner_socket("0"))
    with Client(server.address) as gateway, Client(socket) as runner:
        assert runner.health()
        answer = gateway.generate("The quick", temperature=0, max_tokens=1500, ignore_eos=True)
        next(answer)
        os.kill(server.pids()["model_runner"], signal.SIGTERM)
        deadline = time.monotonic() + LIMIT_S
        while runner.health():
            assert time.monotonic() < deadline, "a draining runner says that it can serve"
            time.sleep(0.02)
        answer.close()
