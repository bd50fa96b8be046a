"""Where log lines go, and what becomes of them when there is nobody to read them."""

import subprocess
import sys

WRITE = """
from pagekeeper.common.logging import StandardError, configure_logging
import structlog, sys
configure_logging("test")
sys.stdin.read()
print("by hand", file=StandardError(), flush=True)
structlog.get_logger().info("by structlog")
print("alive")
"""


def writer() -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", WRITE], stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_lines_go_to_standard_error() -> None:
    with writer() as process:
        stdout, stderr = process.communicate()
    assert (stdout, process.returncode) == ("alive\n", 0)
    assert "by hand" in stderr
    assert "by structlog" in stderr


def test_a_reader_that_is_gone_ends_nobodys_work() -> None:
    with writer() as process:
        assert process.stderr is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stderr.close()
        process.stdin.close()
        assert process.stdout.read() == "alive\n"
    assert process.returncode == 0
