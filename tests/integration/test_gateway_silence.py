"""A runner or its cache manager that is silent, hangs, or speaks too late."""

import asyncio
from pathlib import Path

import grpc
import pytest

from pagekeeper.common.sockets import RuntimeDir
from pagekeeper.v1 import runner_pb2
from tests.fakes.gateway import (
    Answer,
    error_info,
    failure,
    generate_some,
    prompt_request,
    running_gateway,
    status_of,
    until,
)
from tests.fakes.runner import FakeRunner, Script, answer_of, idle
from tests.fakes.tokenizer import write_model_directory

PROMPT = [5, 6, 7]
SERVICE = "pagekeeper.v1.GenerateService"
RUNNERS = "pagekeeper.v1.RunnerService"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model_directory(tmp_path / "tiny")


@pytest.fixture
def sockets(runtime_dir: Path) -> RuntimeDir:
    return RuntimeDir(runtime_dir)


def report(state: int, seconds: float, limit_seconds: float = 0.0) -> runner_pb2.EngineReport:
    return runner_pb2.EngineReport(state=state, step=9, seconds=seconds, limit_seconds=limit_seconds)


def stale_output(submit: runner_pb2.Submit, position: int) -> runner_pb2.ServeResponse:
    output = runner_pb2.SequenceOutput(
        request=submit.request, attempt=submit.attempt, position=position, token_ids=[300] * 3
    )
    return runner_pb2.ServeResponse(step=runner_pb2.StepOutput(step=1, outputs=[output]))


@pytest.mark.parametrize("fault", ["silent", "hung"])
async def test_the_streams_of_a_runner_that_hangs_move_to_the_next(
    runtime_dir: Path, model: Path, sockets: RuntimeDir, fault: str
) -> None:
    script = Script(step_s=0.01)
    async with FakeRunner(sockets.runner_socket("a"), script) as first, running_gateway(runtime_dir, model) as client:
        call = asyncio.create_task(client.generate(prompt_request(PROMPT, seed=1, max_tokens=40)))
        await until(lambda: first.live)
        script.is_paused = True
        if fault == "silent":
            script.answers_pings = False
        else:
            script.engine = report(runner_pb2.EngineReport.STATE_IN_STEP, 3.0, limit_seconds=2.0)
        await client.until_serving(False)
        await until(lambda: not first.live)  # its stream is gone: what it makes when it wakes up reaches nobody
        async with FakeRunner(sockets.runner_socket("b")) as second:
            assert (await call).token_ids == answer_of(1, PROMPT, 40)
            assert second.submits[0].attempt == 2


async def test_a_long_step_within_its_limit_is_no_fault(runtime_dir: Path, model: Path, sockets: RuntimeDir) -> None:
    engine = report(runner_pb2.EngineReport.STATE_IN_STEP, 30.0, limit_seconds=60.0)
    script = Script(engine=engine)
    async with FakeRunner(sockets.runner_socket("a"), script) as runner, running_gateway(runtime_dir, model) as client:
        await client.until_serving()
        await client.generate(prompt_request(PROMPT, max_tokens=5))
        assert [submit.attempt for submit in runner.submits] == [1]


async def test_health_follows_runner_and_manager(runtime_dir: Path, model: Path, sockets: RuntimeDir) -> None:
    async with running_gateway(runtime_dir, model) as client:
        assert not await client.is_serving()
        assert not await client.is_serving(SERVICE)
        async with FakeRunner(sockets.runner_socket("a")) as runner:
            await client.until_serving()
            assert await client.is_serving(SERVICE)
            waiting = runner_pb2.EngineReport.STATE_WAITING_FOR_MANAGER
            runner.script.engine = report(waiting, 2.5)
            await client.until_serving(False)
            await client.until_runners(1)  # the manager's fault, not the runner's
            runner.script.engine = report(waiting, 0.5)
            await client.until_serving()
            # Who has lost the manager says so at once; nobody has to wait for a second to see it.
            runner.script.engine = runner_pb2.EngineReport(state=runner_pb2.EngineReport.STATE_IDLE, detached=True)
            await client.until_serving(False)
            assert not await client.is_serving(RUNNERS)
            runner.script.engine = idle()
            await client.until_serving(True, RUNNERS)
        await client.until_serving(False)
        assert not await client.is_serving(RUNNERS)


async def test_the_health_of_the_runners_tells_when_one_is_missing_and_another_serves(
    runtime_dir: Path, model: Path, sockets: RuntimeDir
) -> None:
    async with FakeRunner(sockets.runner_socket("a")) as one, running_gateway(runtime_dir, model) as client:
        async with FakeRunner(sockets.runner_socket("b")) as other:
            await client.until_serving(True, RUNNERS)
            other.script.engine = runner_pb2.EngineReport(detached=True)
            await client.until_serving(False, RUNNERS)
            other.script.engine = idle()
            await client.until_serving(True, RUNNERS)
        await client.until_serving(False, RUNNERS)
        assert await client.is_serving()
        async with FakeRunner(sockets.runner_socket("b")) as other:
            await client.until_runners(2)
            await client.until_serving(True, RUNNERS)
            other.drain()  # on purpose, so nothing is wrong
            await client.generate(prompt_request(PROMPT, max_tokens=5))
            assert [len(runner.submits) for runner in (one, other)] == [1, 0]
            await other.retire()
            await client.until_runners(1)
            assert await client.is_serving(RUNNERS)
            one.drain()
            await client.until_serving(False)
            assert not await client.is_serving(RUNNERS)


async def test_a_stopped_runner_that_wakes_up_serves_again_and_mixes_nothing_in(
    runtime_dir: Path, model: Path, sockets: RuntimeDir
) -> None:
    script = Script(step_s=0.01)
    async with FakeRunner(sockets.runner_socket("a"), script) as first, running_gateway(runtime_dir, model) as client:
        call = asyncio.create_task(client.generate(prompt_request(PROMPT, seed=1, max_tokens=100)))
        await until(lambda: first.live)
        script.is_paused, script.answers_pings = True, False
        await client.until_serving(False)
        async with FakeRunner(sockets.runner_socket("b"), Script(pauses_at=60)) as second:
            await until(lambda: second.live)
            script.is_paused, script.answers_pings = False, True
            await client.until_runners(2)
            # On its new stream it still speaks of the attempt that it had when it was stopped.
            for position in range(0, 100, 3):
                first.say(stale_output(first.submits[0], position))
            other = await client.generate(prompt_request(PROMPT, seed=2, max_tokens=5))
            assert other.token_ids == answer_of(2, PROMPT, 5)
            second.script.pauses_at = None
            assert (await call).token_ids == answer_of(1, PROMPT, 100)
            assert [submit.attempt for submit in second.submits] == [2]


async def test_late_output_of_an_older_attempt_is_void_where_the_newest_one_runs(
    runtime_dir: Path, model: Path, sockets: RuntimeDir
) -> None:
    script = Script(breaks_at=[5], step_s=0.01)
    async with FakeRunner(sockets.runner_socket("a"), script) as runner, running_gateway(runtime_dir, model) as client:
        call = asyncio.create_task(client.generate(prompt_request(PROMPT, seed=1, max_tokens=60)))
        await until(lambda: len(runner.submits) == 2)
        for position in range(0, 60, 3):
            runner.say(stale_output(runner.submits[0], position))
        assert (await call).token_ids == answer_of(1, PROMPT, 60)
        assert [submit.attempt for submit in runner.submits] == [1, 2]


async def test_case_08_what_a_runner_makes_of_a_request_that_was_left_reaches_nobody(
    runtime_dir: Path, model: Path, sockets: RuntimeDir
) -> None:
    """Case 8: output of a cancelled request, late from a step in flight, is dropped; the next has its own answer."""
    async with FakeRunner(sockets.runner_socket("a")) as runner, running_gateway(runtime_dir, model) as client:
        runner.script.is_paused = True
        call = client.stub.Generate(prompt_request(PROMPT, seed=1, max_tokens=40))
        await until(lambda: runner.live)
        call.cancel()
        await until(lambda: runner.cancels)
        following = asyncio.create_task(client.generate(prompt_request(PROMPT, seed=2, max_tokens=40)))
        await until(lambda: len(runner.submits) == 2)
        runner.say(stale_output(runner.submits[0], 0))
        runner.script.is_paused = False
        assert (await following).token_ids == answer_of(2, PROMPT, 40)


async def test_a_stream_whose_manager_stays_silent_ends_and_says_how_far_it_got(
    runtime_dir: Path, model: Path, sockets: RuntimeDir
) -> None:
    script = Script(pauses_at=7)
    async with (
        FakeRunner(sockets.runner_socket("a"), script) as runner,
        running_gateway(runtime_dir, model, runner_wait_s=0.3) as client,
    ):
        answer = Answer()
        responses = aiter(client.stub.Generate(prompt_request(PROMPT, seed=1, max_tokens=400)))
        while len(answer.token_ids) < 7:
            answer.take(await anext(responses))
        script.engine = report(runner_pb2.EngineReport.STATE_WAITING_FOR_MANAGER, 1.5)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(responses)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert error_info(status_of(caught.value)).metadata["tokens_emitted"] == "7"
        await until(lambda: not runner.live)
        assert client.admission() == (0, 0)
        assert not await client.is_serving()


async def test_case_11_a_manager_that_goes_and_comes_back_is_a_pause(
    runtime_dir: Path, model: Path, sockets: RuntimeDir
) -> None:
    """Case 11: streams stay with their runner while it has no manager, new ones wait there, and all go on."""
    script = Script(pauses_at=7)
    async with FakeRunner(sockets.runner_socket("a"), script) as runner, running_gateway(runtime_dir, model) as client:
        calls = [asyncio.create_task(generate_some(client, 4, 30))]
        await until(lambda: len(runner.live) == 4)
        script.engine = report(runner_pb2.EngineReport.STATE_WAITING_FOR_MANAGER, 9.0)
        await client.until_serving(False)
        calls.append(asyncio.create_task(generate_some(client, 4, 30)))
        await until(lambda: len(runner.live) == 8)
        script.engine, script.pauses_at = idle(), None
        await client.until_serving()
        for answers in await asyncio.gather(*calls):
            for index, answer in enumerate(answers):
                assert answer.token_ids == answer_of(index, [*PROMPT, index], 30)
        assert {submit.attempt for submit in runner.submits} == {1}


@pytest.mark.parametrize("limit", ["client", "server"])
async def test_deadlines_go_on_counting_while_a_stream_has_no_runner(
    runtime_dir: Path, model: Path, sockets: RuntimeDir, limit: str
) -> None:
    async with running_gateway(runtime_dir, model, max_request_s=1.0 if limit == "server" else 0.0) as client:
        request = prompt_request(PROMPT, seed=1, max_tokens=400)
        async with FakeRunner(sockets.runner_socket("a"), Script(pauses_at=3)) as runner:
            await client.until_serving()
            call = client.stub.Generate(request, timeout=1.0 if limit == "client" else None)
            await until(lambda: runner.live)
        code, _ = await failure(call)
        assert code == grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: client.admission() == (0, 0))
        assert client.gateway._runners._router.num_waiting == 0
