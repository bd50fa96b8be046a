"""Requests that arrive while no cache manager is there: they wait, and are either answered or told what was missing."""

import asyncio
import signal
from pathlib import Path

import grpc
import pytest

from pagekeeper.common.sockets import RuntimeDir
from pagekeeper.v1 import runner_pb2
from tests.fakes.gateway import error_info, failure, generate_some, prompt_request, running_gateway, until
from tests.fakes.manager import ManagerProcess
from tests.fakes.runner import FakeRunner, Script, answer_of, idle
from tests.fakes.runner_process import RunnerSpawner
from tests.fakes.tokenizer import write_model_directory

PROMPT = [5, 6, 7]
AWAY = runner_pb2.EngineReport(state=runner_pb2.EngineReport.STATE_WAITING_FOR_MANAGER, seconds=9.0)
POOL = ("--pool-size", "4MiB")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model_directory(tmp_path / "tiny")


@pytest.fixture
def socket(runtime_dir: Path) -> Path:
    return RuntimeDir(runtime_dir).runner_socket("a")


def paused() -> Script:
    """A runner without its manager: it takes requests and makes no step."""
    return Script(is_paused=True, engine=AWAY)


async def test_who_arrives_without_a_manager_waits_so_long_and_is_told_what_was_missing(
    runtime_dir: Path, model: Path, socket: Path
) -> None:
    async with (
        FakeRunner(socket, paused()) as runner,
        running_gateway(runtime_dir, model, runner_wait_s=0.5) as client,
    ):
        await client.until_runners(1)
        calls = [client.stub.Generate(prompt_request(PROMPT, seed=seed)) for seed in range(3)]
        await until(lambda: len(runner.submits) == 3)
        for code, status in await asyncio.gather(*map(failure, calls)):
            assert (code, status.message) == (grpc.StatusCode.UNAVAILABLE, "its runner had no cache manager for 0.5 s")
            info = error_info(status)
            assert (info.reason, info.metadata["tokens_emitted"]) == ("UNAVAILABLE", "0")
        await until(lambda: not runner.live)
        assert client.admission() == (0, 0)
        # The gateway takes more all the same, and serves them as soon as it can.
        late = asyncio.create_task(client.generate(prompt_request(PROMPT, seed=9, max_tokens=5)))
        await until(lambda: runner.live)
        runner.script.engine, runner.script.is_paused = idle(), False
        assert (await late).token_ids == answer_of(9, PROMPT, 5)


async def test_who_arrives_without_a_runner_is_told_that_it_was_the_runner(
    runtime_dir: Path, model: Path, socket: Path
) -> None:
    async with running_gateway(runtime_dir, model, runner_wait_s=0.5) as client:
        code, status = await failure(client.stub.Generate(prompt_request(PROMPT)))
        assert (code, status.message) == (grpc.StatusCode.UNAVAILABLE, "no runner became ready within 0.5 s")
        async with FakeRunner(socket):
            await client.until_serving()
        await client.until_runners(0)
        code, status = await failure(client.stub.Generate(prompt_request(PROMPT)))
        assert (code, status.message) == (grpc.StatusCode.UNAVAILABLE, "no runner was ready for it for 0.5 s")
        assert client.admission() == (0, 0)


async def test_none_that_waits_or_queues_is_lost_when_the_manager_comes_back(
    runtime_dir: Path, model: Path, socket: Path
) -> None:
    async with (
        FakeRunner(socket, paused()) as runner,
        running_gateway(runtime_dir, model, max_concurrent=3) as client,
    ):
        answers = asyncio.create_task(generate_some(client, 8, 20))
        await until(lambda: client.admission() == (3, 5))
        await client.until_runners(1)
        assert not await client.is_serving()
        runner.script.engine, runner.script.is_paused = idle(), False
        for index, answer in enumerate(await answers):
            assert answer.token_ids == answer_of(index, [*PROMPT, index], 20)
        assert len(runner.submits) == 8
        assert client.admission() == (0, 0)


async def test_who_gives_up_lets_those_behind_it_in(runtime_dir: Path, model: Path, socket: Path) -> None:
    async with (
        FakeRunner(socket, paused()) as runner,
        running_gateway(runtime_dir, model, max_concurrent=1, runner_wait_s=0.5) as client,
    ):
        await client.until_runners(1)
        first = client.stub.Generate(prompt_request(PROMPT, seed=1))
        await until(lambda: runner.submits)
        second = asyncio.create_task(client.generate(prompt_request(PROMPT, seed=2, max_tokens=5)))
        assert (await failure(first))[0] == grpc.StatusCode.UNAVAILABLE
        await until(lambda: len(runner.submits) == 2)
        runner.script.engine, runner.script.is_paused = idle(), False
        assert (await second).token_ids == answer_of(2, PROMPT, 5)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
async def test_requests_to_a_real_runner_whose_manager_is_gone_are_answered_by_its_successor(
    spawner: RunnerSpawner, runtime_dir: Path, tiny_model: Path, end: signal.Signals
) -> None:
    with ManagerProcess(runtime_dir, *POOL) as manager, spawner.started(runtime_dir) as runner:
        async with running_gateway(runtime_dir, tiny_model) as client:
            await client.until_serving()
            expected = await generate_some(client, 4, 20)
            manager.process.send_signal(end)
            manager.process.wait()
            answers = asyncio.create_task(generate_some(client, 4, 20))
            await client.until_serving(False)
            assert not answers.done()
            assert client.admission() == (4, 0)
            successor = await asyncio.to_thread(ManagerProcess, runtime_dir, *POOL)
            with successor:
                assert [answer.token_ids for answer in await answers] == [answer.token_ids for answer in expected]
                await until(lambda: successor.stats().pool.free_blocks == successor.stats().pool.total_blocks - 1)
                assert list(successor.audit().violations) == []
                assert runner.exit_code() is None
