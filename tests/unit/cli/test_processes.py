"""Which processes are whose, and which are stopped; real ones."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from pagekeeper.cli.processes import children, is_stopped

LIMIT_S = 20.0
# A parent like `up`: one child for each module, which is a standby if its flag says so, and a child of another kind.
PARENT = """
import subprocess, sys
flags = [["-m", "http.server", "--bind", "127.0.0.1", "0"], ["-m", "timeit", "-s", "input()", "--", "--standby"]]
flags.append(["-c", "input()"])
started = [subprocess.Popen([sys.executable, *one], stdin=subprocess.PIPE, stdout=-3, stderr=-3) for one in flags]
print(*(process.pid for process in started), flush=True)
input()
for process in started: process.kill()
"""


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_children_of_up_are_named_by_their_modules() -> None:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        server, standby, _ = (int(pid) for pid in parent.stdout.readline().split())
        wait_until(lambda: children(parent.pid) == {"http.server": server, "timeit_standby": standby})
        os.kill(server, signal.SIGKILL)  # the parent does not reap it: a zombie has no command line
        wait_until(lambda: children(parent.pid) == {"timeit_standby": standby})
        parent.communicate("\n", timeout=LIMIT_S)


def test_a_process_is_stopped_until_it_is_continued_or_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: is_stopped(process.pid))
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: not is_stopped(process.pid))
        process.send_signal(signal.SIGSTOP)
        process.kill()
    assert not is_stopped(process.pid)
