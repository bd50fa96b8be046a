"""A runner's place is taken by the next one of its name, and streams go on."""

import asyncio
import signal
import threading
from pathlib import Path

import pytest

from model_runner.succession import take_over
from pagekeeper.common.errors import UnavailableError
from pagekeeper.common.sockets import RuntimeDir
from tests.fakes.manager import ManagerProcess
from tests.fakes.resubmitting_gateway import ResubmittingGateway
from tests.fakes.runner_process import LIMIT_S, RunnerSpawner, until

POOL = ("--pool-size", "4MiB")
PROMPTS = [[5 + index] * (20 + 7 * index) for index in range(4)]


def test_a_successor_takes_the_name_and_the_streams_of_the_running_one(
    spawner: RunnerSpawner, runtime_dir: Path
) -> None:
    with (
        ManagerProcess(runtime_dir, *POOL) as manager,
        spawner.started(runtime_dir) as first,
        ResubmittingGateway(first.socket) as gateway,
    ):
        expected = gateway.wait([gateway.submit(prompt, 300) for prompt in PROMPTS])
        with spawner.started(runtime_dir, "--replace", "--role", "decode") as second:
            until(lambda: second.has_logged("attached to the cache manager"))
            streams = [gateway.submit(prompt, 300) for prompt in PROMPTS]
            assert first.wait() == 0
            free = threading.Thread(target=RuntimeDir(runtime_dir).wait_until_free, args=("runner-0",))
            free.start()
            second.wait_until_ready()
            assert gateway.wait(streams) == expected
            assert [hello.role for hello in gateway.hellos] == [1, 3]
            assert gateway.drains == 1
            # Even the part of a block that each had was released in good order, and found again.
            assert max(tokens for stream in streams for tokens in stream.recomputed) <= 1
            assert free.is_alive()
            second.signal(signal.SIGTERM)
            assert second.wait() == 0
            free.join(LIMIT_S)
            assert not free.is_alive()
        until(lambda: not manager.stats().sessions)
        assert list(manager.audit().violations) == []


def test_who_replaces_nobody_just_serves(spawner: RunnerSpawner, runtime_dir: Path) -> None:
    with (
        ManagerProcess(runtime_dir, *POOL),
        spawner.started(runtime_dir, "--replace") as runner,
        ResubmittingGateway(runner.socket) as gateway,
    ):
        assert gateway.wait([gateway.submit(PROMPTS[0], 5)])[0][0]
        assert gateway.hellos[0].runner_id.startswith("0-")


async def test_a_predecessor_that_hangs_is_left_alone_and_named(spawner: RunnerSpawner, runtime_dir: Path) -> None:
    with ManagerProcess(runtime_dir, *POOL), spawner.started(runtime_dir) as runner:
        await asyncio.to_thread(runner.wait_until_ready)
        runner.signal(signal.SIGSTOP)
        with pytest.raises(UnavailableError, match=r"the running runner-0 has not ended within 0\.5 s; kill"):
            await take_over(RuntimeDir(runtime_dir), "0", wait_s=0.5)
        assert runner.exit_code() is None


def test_a_runner_without_work_is_gone_at_once(spawner: RunnerSpawner, runtime_dir: Path) -> None:
    with ManagerProcess(runtime_dir, *POOL), spawner.started(runtime_dir) as first:
        first.wait_until_ready()
        with spawner.started(runtime_dir, "--replace") as second:
            assert first.wait() == 0
            second.wait_until_ready()
            with spawner.started(runtime_dir, "--replace") as third:
                assert second.wait() == 0
                third.wait_until_ready()
                assert third.socket.exists()
