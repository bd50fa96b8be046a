"""The cache manager's process at its start."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LIMIT_S = 20.0

SLOW_START = """
import subprocess, sys
from cache_manager import __main__, server
from pagekeeper.common.process import run_process

def take_for_a_minute(settings):
    subprocess.run([sys.executable, "-c", "import time; print('trying', flush=True); time.sleep(60)"])

server.open_pool = take_for_a_minute
run_process("cache-manager", __main__.main)
"""


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_a_manager_that_is_told_to_stop_while_it_takes_its_pool_does_so_at_once(
    runtime_dir: Path, signal_number: int
) -> None:
    command = [sys.executable, "-c", SLOW_START, "--runtime-dir", str(runtime_dir)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "trying\n"
        process.send_signal(signal_number)
        # Its end, and that of the process that tries, close the pipes.
        _, errors = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, errors) == (0, "")
