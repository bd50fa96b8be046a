"""`python -m tests.fakes.runner_spawner`: real runner processes without the seconds in which each would import torch.

It has imported everything and started no thread, so it forks. One line of JSON in, one out: {"argv", "failpoints",
"log"} begins a runner and is answered with {"pid"}; {"pid"} is answered with {"code"}, null while that one lives.
A runner takes SIGUSR1 as the end of its stream to the cache manager, which lives on.
"""

import ctypes
import gc
import json
import os
import signal
import sys

from cache_manager.client import CacheClient
from model_runner.__main__ import main
from pagekeeper.common import failpoints
from pagekeeper.common.process import run_process

_PR_SET_PDEATHSIG = 1


def serve() -> None:
    codes: dict[int, int] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "argv" in request:
            answer = {"pid": _begin(request["argv"], request["failpoints"], request["log"])}
        else:
            answer = {"code": _code_of(request["pid"], codes)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _begin(argv: list[str], points: str, log: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 2)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(0, 1)
    sys.argv[1:] = argv
    failpoints._ARMED = failpoints.Failpoints(points) if points else None
    signal.signal(signal.SIGUSR1, _break_stream)
    run_process("runner", main)


def _break_stream(*_: object) -> None:
    for client in gc.get_objects():
        if isinstance(client, CacheClient):
            client._stream._call.cancel()


def _code_of(pid: int, codes: dict[int, int]) -> int | None:
    if pid not in codes:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            codes[pid] = os.waitstatus_to_exitcode(status)
    return codes.get(pid)


if __name__ == "__main__":
    serve()
