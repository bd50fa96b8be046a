"""Whoever survives the deaths of others has no more descriptors, threads, tasks or memory than before."""

import time
from pathlib import Path

import pytest

from tests import census
from tests.fakes.cycles import num_cycles
from tests.fakes.manager import POOL as TINY_POOL
from tests.fakes.manager import ManagerProcess, runner_process, wait_until
from tests.fakes.resubmitting_gateway import ResubmittingGateway
from tests.fakes.runner_process import RunnerSpawner, until

POOL = ("--pool-size", "2MiB")
MEMORY_MARGIN = 8 << 20
"""What oneDNN and malloc keep levels off within 30 restarts, 8 MB after the first ten of them."""
SETTLE_LIMIT_S = 40.0
"""gRPC's own threads come with load and go after 20 s of idleness."""
pytestmark = pytest.mark.timeout(120 + 5 * num_cycles(16))


def check_no_growth(before: census.Census, pid: int, folder: Path) -> None:
    deadline = time.monotonic() + SETTLE_LIMIT_S
    while (after := census.take({"": pid}, folder)[""]).exceeds(before, MEMORY_MARGIN):
        assert time.monotonic() < deadline, (before, after)
        time.sleep(0.1)


def test_a_manager_whose_runners_are_killed_does_not_grow(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in census.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    with ManagerProcess(runtime_dir, *TINY_POOL) as manager:

        def cycle(number: int) -> None:
            with runner_process(manager, base=100 * number, num_blocks=5, num_sealed=3):
                pass
            wait_until(lambda: not manager.stats().sessions)

        for number in range(4 + num_cycles(16) // 5):
            cycle(number)
        before = census.take({"": manager.process.pid}, tmp_path)[""]
        for number in range(num_cycles(16)):
            cycle(number)
        check_no_growth(before, manager.process.pid, tmp_path)
        assert list(manager.audit().violations) == []


def test_a_runner_whose_managers_are_killed_does_not_grow(
    runtime_dir: Path, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in census.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    with (
        RunnerSpawner(tiny_model) as spawner,
        spawner.started(runtime_dir) as runner,
        ResubmittingGateway(runner.socket) as gateway,
    ):

        def cycle() -> None:
            with ManagerProcess(runtime_dir, *POOL) as manager:
                streams = [gateway.submit([5 + index] * 20, 400) for index in range(3)]
                until(lambda: min(stream.num_tokens for stream in streams) > 3)
                manager.process.kill()
                manager.process.wait()
                for stream in streams:
                    gateway.cancel(stream)

        for _ in range(4 + num_cycles(10) // 5):
            cycle()
        before = census.take({"": runner.pid}, tmp_path)[""]
        for _ in range(num_cycles(10)):
            cycle()
        check_no_growth(before, runner.pid, tmp_path)
        assert len(gateway.hellos) == 1
