"""One supervised child, as a real process."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from pagekeeper.cli.supervisor import Child, ChildFailedError

PROGRAM = "tests.unit.cli.child_program"


class Supervised:
    """A child, what it wrote, and the pid of each process it has been."""

    def __init__(self, **flags: str) -> None:
        self.lines: list[str | dict[str, Any]] = []
        self._news = asyncio.Event()
        self.child = Child("child", PROGRAM, {f"--{name}": value for name, value in flags.items()}, self._relay)
        self.task = asyncio.create_task(self.child.keep_alive())

    def _relay(self, line: str | dict[str, Any]) -> None:
        self.lines.append(line)
        self._news.set()

    def pids(self) -> list[int]:
        return [int(line.split()[1]) for line in self.lines if isinstance(line, str) and line.startswith("pid")]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                self._news.clear()
                await self._news.wait()


@contextlib.asynccontextmanager
async def supervised(**flags: str) -> AsyncIterator[Supervised]:
    running = Supervised(**flags)
    try:
        yield running
    finally:
        await running.child.stop(grace_s=5)
        await asyncio.wait([running.task])


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_killed_child_comes_back_where_it_listened_before() -> None:
    async with supervised(mode="serve", listen="127.0.0.1:0") as running:
        await running.child.ready.wait()
        os.kill(running.pids()[0], signal.SIGKILL)
        await running.until(lambda: len(running.pids()) == 2)
        assert f"pid {running.pids()[0]} listen 127.0.0.1:0" in running.lines
        assert f"pid {running.pids()[1]} listen 127.0.0.1:4711" in running.lines


async def test_a_child_that_dies_again_and_again_is_restarted_later_each_time() -> None:
    async with supervised(mode="serve") as running:
        began = time.monotonic()
        for count in (1, 2, 3):
            await running.until(lambda count=count: len(running.pids()) == count and running.child.ready.is_set())
            os.kill(running.pids()[-1], signal.SIGKILL)
        await running.until(lambda: len(running.pids()) == 4)
        assert time.monotonic() - began >= 0.1 + 0.2 + 0.4  # a lower bound: the pauses that backing off must make


async def test_a_child_that_ends_before_it_is_ready_is_not_restarted() -> None:
    async with supervised(mode="refuse") as running:
        with pytest.raises(ChildFailedError) as failed:
            await running.task
        assert failed.value.code == 2
        assert len(running.pids()) == 1
        assert "child: pool_size: too small" in running.lines


async def test_stopping_a_child_ends_its_process() -> None:
    async with supervised(mode="serve") as running:
        await running.child.ready.wait()
        await running.child.stop(grace_s=5)
        assert not is_alive(running.pids()[0])


async def test_a_child_that_ignores_sigterm_is_killed_after_its_grace() -> None:
    async with supervised(mode="stubborn") as running:
        await running.child.ready.wait()
        await running.child.stop(grace_s=0.05)
        assert not is_alive(running.pids()[0])


async def test_a_line_of_megabytes_does_not_stop_the_log() -> None:
    async with supervised(mode="chatty") as running:
        async with asyncio.timeout(20):
            await running.child.ready.wait()


def test_a_child_dies_with_its_killed_parent() -> None:
    program = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-m', 'pagekeeper.cli.child', str(os.getpid()), "
        f"'{PROGRAM}', '--mode', 'stubborn'], stdout=subprocess.PIPE, text=True)\n"
        "print(child.stdout.readline(), child.stdout.readline(), flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline().split()[1])
        assert is_alive(child)
        parent.kill()
    deadline = time.monotonic() + 20
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(child)
