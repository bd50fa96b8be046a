"""One supervised child, as a real process."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from pagekeeper.cli import child as child_module
from pagekeeper.cli.life import Line
from pagekeeper.cli.supervisor import Backoff, Child, ChildFailedError, Program
from pagekeeper.common.sockets import RuntimeDir

PROGRAM = "tests.unit.cli.child_program"
LIMIT_S = 20.0


class Supervised:
    """A child, what it wrote, and the pid of each process it has been."""

    def __init__(
        self, flags: dict[str, str | None], runtime_dir: Path, hang_limit_s: float, restart_after_s: float
    ) -> None:
        self.lines: list[Line] = []
        self._news = asyncio.Event()
        program = Program("child", PROGRAM, flags, lock="child", health="--listen", restart_after_s=restart_after_s)
        self.child = Child(program, RuntimeDir(runtime_dir), self._relay, hang_limit_s)
        self.task = asyncio.create_task(self.child.keep_alive())

    def _relay(self, line: Line) -> None:
        self.lines.append(line)
        self._news.set()

    def pids(self) -> list[int]:
        return [int(line.split()[1]) for line in self.lines if isinstance(line, str) and line.startswith("pid")]

    def times_ready(self) -> int:
        return sum(isinstance(line, dict) for line in self.lines)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                self._news.clear()
                await self._news.wait()


@pytest.fixture
def supervised(runtime_dir: Path) -> Callable[..., contextlib.AbstractAsyncContextManager[Supervised]]:
    """Supervise a child with these flags: `supervised(mode="serve")`; the end of the `with` block is its end."""

    @contextlib.asynccontextmanager
    async def supervise(
        hang_limit_s: float = 0.0, restart_after_s: float = 0.0, **values: str
    ) -> AsyncIterator[Supervised]:
        flags: dict[str, str | None] = {f"--{name.replace('_', '-')}": value for name, value in values.items()}
        running = Supervised(flags, runtime_dir, hang_limit_s, restart_after_s)
        try:
            yield running
        finally:
            await running.child.stop(grace_s=5)
            await asyncio.wait([running.task])

    return supervise


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


Supervise = Callable[..., contextlib.AbstractAsyncContextManager[Supervised]]


async def test_a_killed_child_comes_back_where_it_listened_before(supervised: Supervise) -> None:
    async with supervised(mode="serve", listen="127.0.0.1:0") as running:
        await running.child.ready.wait()
        os.kill(running.pids()[0], signal.SIGKILL)
        await running.until(lambda: len(running.pids()) == 2)
        assert f"pid {running.pids()[0]} listen 127.0.0.1:0" in running.lines
        assert f"pid {running.pids()[1]} listen 127.0.0.1:4711" in running.lines


def test_after_a_life_that_was_ready_a_restart_is_immediate_however_many_there_were() -> None:
    backoff = Backoff()
    assert [backoff.delay_s(was_ready=True, lived_s=5.0) for _ in range(100)] == [0.0] * 100


def test_lives_that_end_as_soon_as_they_are_ready_begin_once_a_second() -> None:
    assert Backoff().delay_s(was_ready=True, lived_s=0.25) == 0.75


def test_a_restart_leaves_the_machine_to_whoever_takes_over() -> None:
    backoff = Backoff(at_least_s=1.0)
    assert backoff.delay_s(was_ready=True, lived_s=5.0) == 1.0
    assert [backoff.delay_s(was_ready=False, lived_s=3.0) for _ in range(5)] == [1.0, 1.0, 1.0, 1.0, 1.6]


def test_after_lives_that_were_never_ready_a_restart_waits_longer_each_time() -> None:
    backoff = Backoff()
    delays = [backoff.delay_s(was_ready=False, lived_s=3.0) for _ in range(9)]
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    backoff.delay_s(was_ready=True, lived_s=3.0)
    assert backoff.delay_s(was_ready=False, lived_s=3.0) == 0.1


async def test_a_child_that_ends_before_it_is_ready_is_not_restarted(supervised: Supervise) -> None:
    async with supervised(mode="refuse") as running:
        with pytest.raises(ChildFailedError) as failed:
            await running.task
        assert failed.value.code == 2
        assert len(running.pids()) == 1
        assert "child: pool_size: too small" in running.lines


async def test_a_child_that_was_replaced_comes_back_when_its_successor_has_ended(
    supervised: Supervise, runtime_dir: Path
) -> None:
    async with supervised(mode="serve", runtime_dir=str(runtime_dir)) as running:
        await running.child.ready.wait()
        successor = asyncio.create_task(asyncio.to_thread(RuntimeDir(runtime_dir).claim, "child", LIMIT_S))
        os.kill(running.pids()[0], signal.SIGTERM)
        lock = await successor
        await asyncio.sleep(1.2)  # longer than any restart would wait
        assert len(running.pids()) == 1
        os.close(lock)
        await running.until(lambda: running.times_ready() == 2)


async def test_stopping_does_not_wait_for_a_successor_that_is_not_ours(
    supervised: Supervise, runtime_dir: Path
) -> None:
    async with supervised(mode="serve") as running:
        await running.child.ready.wait()
        lock = RuntimeDir(runtime_dir).claim("child")
        os.kill(running.pids()[0], signal.SIGKILL)
        await asyncio.sleep(1.2)
        assert len(running.pids()) == 1
        async with asyncio.timeout(LIMIT_S):
            assert await running.child.stop(grace_s=LIMIT_S)
            await running.task
        os.close(lock)


async def test_a_replacement_becomes_the_child_when_the_old_one_has_ended(
    supervised: Supervise, runtime_dir: Path
) -> None:
    async with supervised(mode="serve", runtime_dir=str(runtime_dir)) as running:
        await running.child.ready.wait()
        replaced = asyncio.create_task(running.child.replace(LIMIT_S))
        await running.until(lambda: len(running.pids()) == 2)
        old, new = running.pids()
        assert not await running.child.replace(LIMIT_S)  # one at a time
        os.kill(old, signal.SIGTERM)  # as a successor would have it retire
        assert await replaced
        os.kill(new, signal.SIGKILL)
        await running.until(lambda: running.times_ready() == 3)
        assert len(running.pids()) == 3


async def test_a_replacement_that_fails_leaves_the_old_one_alone(supervised: Supervise) -> None:
    async with supervised(mode="refuse-to-replace") as running:
        await running.child.ready.wait()
        assert not await running.child.replace(LIMIT_S)
        old, new = running.pids()
        assert (is_alive(old), is_alive(new)) == (True, False)


async def test_a_replacement_that_never_becomes_ready_is_killed_and_the_old_one_serves_on(
    supervised: Supervise,
) -> None:
    async with supervised(mode="late-to-replace") as running:
        await running.child.ready.wait()
        assert not await running.child.replace(start_limit_s=1.0)
        old, *new = running.pids()
        assert is_alive(old)
        assert not any(map(is_alive, new))
        os.kill(old, signal.SIGKILL)  # it is still the one that is kept alive
        await running.until(lambda: running.times_ready() == 2)


async def test_a_limit_on_replacements_does_not_end_the_restart_that_one_has_become(supervised: Supervise) -> None:
    async with supervised(mode="late-to-replace") as running:
        await running.child.ready.wait()
        replaced = asyncio.create_task(running.child.replace(start_limit_s=4.0))
        await running.until(lambda: len(running.pids()) == 2)
        os.kill(running.pids()[0], signal.SIGKILL)
        assert not await replaced
        assert is_alive(running.pids()[1])


async def test_children_do_not_repeat_the_warning_of_a_misspelt_variable(
    supervised: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEKEEPER_POOLSIZE", "1GiB")
    async with supervised(mode="serve") as running:
        await running.child.ready.wait()
        assert not [line for line in running.lines if "POOLSIZE" in str(line)]


async def test_when_the_old_one_dies_its_replacement_is_the_restart(supervised: Supervise, runtime_dir: Path) -> None:
    async with supervised(mode="serve", runtime_dir=str(runtime_dir)) as running:
        await running.child.ready.wait()
        replaced = asyncio.create_task(running.child.replace(LIMIT_S))
        await running.until(lambda: len(running.pids()) == 2)
        os.kill(running.pids()[0], signal.SIGKILL)
        assert await replaced
        assert len(running.pids()) == 2


async def test_a_replacement_while_a_restart_waits_is_the_restart(supervised: Supervise, runtime_dir: Path) -> None:
    async with supervised(restart_after_s=1000.0, mode="serve", runtime_dir=str(runtime_dir)) as running:
        await running.child.ready.wait()
        os.kill(running.pids()[0], signal.SIGKILL)
        while is_alive(running.pids()[0]):
            await asyncio.sleep(0.01)
        assert await running.child.replace(LIMIT_S)
        again = asyncio.create_task(running.child.replace(LIMIT_S))
        await running.until(lambda: len(running.pids()) == 3)
        os.kill(running.pids()[1], signal.SIGTERM)
        assert await again


async def test_stopping_during_a_replacement_ends_both(supervised: Supervise, runtime_dir: Path) -> None:
    async with supervised(mode="serve", runtime_dir=str(runtime_dir)) as running:
        await running.child.ready.wait()
        replaced = asyncio.create_task(running.child.replace(LIMIT_S))
        await running.until(lambda: len(running.pids()) == 2)
        assert await running.child.stop(grace_s=LIMIT_S)
        assert not await replaced
        assert not [pid for pid in running.pids() if is_alive(pid)]


async def test_a_stopped_child_is_killed_and_restarted(supervised: Supervise) -> None:
    async with supervised(hang_limit_s=1.0, mode="answer", listen="127.0.0.1:0") as running:
        await running.child.ready.wait()
        os.kill(running.pids()[0], signal.SIGSTOP)
        await running.until(lambda: running.times_ready() == 2)
        assert not is_alive(running.pids()[0])


async def test_a_child_that_is_stopped_while_it_starts_is_killed(supervised: Supervise) -> None:
    async with supervised(hang_limit_s=0.5, mode="late") as running:
        await running.until(lambda: len(running.pids()) == 1)
        os.kill(running.pids()[0], signal.SIGSTOP)
        with pytest.raises(ChildFailedError) as failed:
            await asyncio.wait_for(running.task, LIMIT_S)
        assert failed.value.code == -signal.SIGKILL


async def test_a_child_that_answers_badly_or_never_did_is_left_alone(supervised: Supervise) -> None:
    for mode in ("answer", "serve", "late"):
        async with supervised(hang_limit_s=0.25, mode=mode, listen="127.0.0.1:0") as running:
            await running.until(lambda running=running: len(running.pids()) == 1)
            await asyncio.sleep(1.5)  # limits over limits
            assert is_alive(running.pids()[0])
            assert len(running.pids()) == 1


async def test_stopping_a_child_ends_its_process(supervised: Supervise) -> None:
    async with supervised(mode="serve") as running:
        await running.child.ready.wait()
        assert await running.child.stop(grace_s=5)
        assert not is_alive(running.pids()[0])


async def test_a_stopped_child_is_woken_to_end(supervised: Supervise) -> None:
    async with supervised(mode="serve") as running:
        await running.child.ready.wait()
        os.kill(running.pids()[0], signal.SIGSTOP)
        async with asyncio.timeout(LIMIT_S):
            assert await running.child.stop(grace_s=10 * LIMIT_S)


async def test_a_child_that_ignores_sigterm_is_killed_after_its_grace(supervised: Supervise) -> None:
    async with supervised(mode="stubborn") as running:
        await running.child.ready.wait()
        assert not await running.child.stop(grace_s=0.05)
        assert not is_alive(running.pids()[0])


async def test_a_line_of_megabytes_does_not_stop_the_log(supervised: Supervise) -> None:
    async with supervised(mode="chatty") as running:
        async with asyncio.timeout(LIMIT_S):
            await running.child.ready.wait()


def test_a_child_dies_with_its_killed_parent() -> None:
    program = (
        "import subprocess, sys, time\n"
        "from pagekeeper.cli.child import command\n"
        f"child = subprocess.Popen(command('{PROGRAM}', '--mode', 'stubborn'), stdout=subprocess.PIPE, text=True)\n"
        "print(child.stdout.readline(), child.stdout.readline(), flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline().split()[1])
        assert is_alive(child)
        parent.kill()
    deadline = time.monotonic() + LIMIT_S
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(child)


def test_what_every_restart_waits_for_imports_next_to_nothing() -> None:
    program = f"exec(open({child_module.__file__!r}).read(), {{'__name__': 'child'}}); import sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-IS", "-c", program], capture_output=True, text=True, check=True)
    assert not {"site", "typing", "inspect", "pagekeeper"} & set(done.stdout.split())
