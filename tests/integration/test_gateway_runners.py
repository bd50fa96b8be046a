"""The gateway and its runners: one is lost, hangs, drains, comes back, or never comes."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from pagekeeper.common.sockets import SERVER_OPTIONS, RuntimeDir, unix_target
from pagekeeper.v1 import generate_pb2, runner_pb2, types_pb2
from tests.fakes.gateway import (
    error_info,
    failure,
    generate_some,
    prompt_request,
    running_gateway,
    until,
)
from tests.fakes.runner import FakeRunner, Script, answer_of, idle
from tests.fakes.tokenizer import write_model_directory

PROMPT = [5, 6, 7]
SERVICE = "pagekeeper.v1.GenerateService"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model_directory(tmp_path / "tiny")


@pytest.fixture
def sockets(runtime_dir: Path) -> RuntimeDir:
    return RuntimeDir(runtime_dir)


async def test_a_stream_goes_on_over_broken_links_with_every_token_once(
    runtime_dir: Path, model: Path, sockets: RuntimeDir
) -> None:
    script = Script(breaks_at=[5, 9, 30])
    async with FakeRunner(sockets.runner_socket("a"), script) as runner, running_gateway(runtime_dir, model) as client:
        answer = await client.generate(prompt_request(PROMPT, seed=1, max_tokens=60))
        assert answer.token_ids == answer_of(1, PROMPT, 60)
        assert [submit.attempt for submit in runner.submits] == [1, 2, 3, 4]
        assert len({submit.request for submit in runner.submits}) == 1
        known = [list(submit.candidates[0].generated_token_ids) for submit in runner.submits]
        assert known == [answer_of(1, PROMPT, position) for position in (0, 5, 9, 30)]
        assert answer.usage == types_pb2.Usage(
            prompt_tokens=3, cached_tokens=16, recomputed_tokens=30, completion_tokens=60
        )


async def test_the_streams_of_a_dead_runner_move_to_the_next(
    runtime_dir: Path, model: Path, sockets: RuntimeDir
) -> None:
    async with (
        FakeRunner(sockets.runner_socket("a")) as first,
        FakeRunner(sockets.runner_socket("b")) as second,
        running_gateway(runtime_dir, model) as client,
    ):
        first.script.step_s = second.script.step_s = 0.005
        await client.until_runners(2)
        answers = asyncio.create_task(generate_some(client, 8, 100))
        await until(lambda: len(first.live) == 4 and len(second.live) == 4)
        await first.die()
        for index, answer in enumerate(await answers):
            assert answer.token_ids == answer_of(index, [*PROMPT, index], 100)
        assert len(second.submits) == 8
        assert await client.is_serving()


async def test_a_runner_that_comes_back_takes_the_streams_that_wait(
    runtime_dir: Path, model: Path, sockets: RuntimeDir
) -> None:
    async with running_gateway(runtime_dir, model) as client:
        async with FakeRunner(sockets.runner_socket("a"), Script(step_s=0.01)) as first:
            answers = asyncio.create_task(generate_some(client, 4, 50))
            await until(lambda: len(first.live) == 4)
        await client.until_serving(False)
        late = asyncio.create_task(client.generate(prompt_request(PROMPT, seed=9, max_tokens=5)))
        async with FakeRunner(sockets.runner_socket("a")):
            for index, answer in enumerate(await answers):
                assert answer.token_ids == answer_of(index, [*PROMPT, index], 50)
            assert (await late).token_ids == answer_of(9, PROMPT, 5)


async def test_a_draining_runners_refusal_sends_the_request_to_another(
    runtime_dir: Path, model: Path, sockets: RuntimeDir
) -> None:
    refusal = runner_pb2.Refusal(code=runner_pb2.Refusal.CODE_DRAINING)
    script = Script(refusal=refusal)
    async with FakeRunner(sockets.runner_socket("a"), script) as first, running_gateway(runtime_dir, model) as client:
        call = asyncio.create_task(client.generate(prompt_request(PROMPT, seed=1, max_tokens=5)))
        await until(lambda: first.submits)
        await client.until_serving(False)
        async with FakeRunner(sockets.runner_socket("b")):
            assert (await call).token_ids == answer_of(1, PROMPT, 5)
        assert len(first.submits) == 1


async def test_without_a_runner_a_request_waits_only_so_long(runtime_dir: Path, model: Path) -> None:
    async with running_gateway(runtime_dir, model, runner_wait_s=0.2) as client:
        code, status = await failure(client.stub.Generate(prompt_request(PROMPT)))
        assert (code, error_info(status).metadata["tokens_emitted"]) == (grpc.StatusCode.UNAVAILABLE, "0")
        assert not await client.is_serving()


async def test_what_is_wrong_without_a_runner_is_said_without_one(runtime_dir: Path, model: Path) -> None:
    async with running_gateway(runtime_dir, model, runner_wait_s=1000.0) as client:
        unknown = generate_pb2.GenerateRequest(model="other", text="hi")
        assert (await failure(client.stub.Generate(unknown)))[0] == grpc.StatusCode.NOT_FOUND
        wrong = prompt_request(PROMPT, temperature=-1.0)
        assert (await failure(client.stub.Generate(wrong)))[0] == grpc.StatusCode.INVALID_ARGUMENT


async def test_the_servers_own_limit_counts_the_wait_for_a_first_runner(runtime_dir: Path, model: Path) -> None:
    async with running_gateway(runtime_dir, model, runner_wait_s=1000.0, max_request_s=0.2) as client:
        code, status = await failure(client.stub.Generate(prompt_request(PROMPT)))
        assert (code, error_info(status).reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE")


async def test_a_drain_ends_the_wait_for_a_first_runner(runtime_dir: Path, model: Path) -> None:
    async with running_gateway(runtime_dir, model, runner_wait_s=1000.0, grace_s=1000.0) as client:
        call = asyncio.create_task(failure(client.stub.Generate(prompt_request(PROMPT))))
        await until(lambda: client.gateway._service._entering)
        client.stop.set()
        code, status = await call
        assert (code, status.message) == (grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
        assert error_info(status).reason == "DRAINING"
        await client.serving


async def test_an_unknown_finish_reason_loses_the_link_and_nothing_else(
    runtime_dir: Path, model: Path, sockets: RuntimeDir
) -> None:
    script = Script(last_reason=99)
    async with FakeRunner(sockets.runner_socket("a"), script) as runner, running_gateway(runtime_dir, model) as client:
        call = asyncio.create_task(client.generate(prompt_request(PROMPT, seed=1, max_tokens=5)))
        await until(lambda: len(runner.submits) == 2)
        script.last_reason = types_pb2.FINISH_REASON_LENGTH
        assert (await call).token_ids == answer_of(1, PROMPT, 5)
        assert not client.serving.done()


@pytest.mark.parametrize(
    "message",
    [
        b"\xff\xff\xff",
        runner_pb2.ServeResponse(pong=runner_pb2.Pong(engine=idle())).SerializeToString(),
        runner_pb2.ServeResponse(hello=runner_pb2.RunnerHello(runner_id="a")).SerializeToString(),
    ],
    ids=["no message", "no introduction", "no vocabulary"],
)
async def test_a_runner_that_sends_anything_wrong_is_never_ready(
    runtime_dir: Path, model: Path, sockets: RuntimeDir, message: bytes
) -> None:
    num_streams = 0

    async def serve(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        nonlocal num_streams
        num_streams += 1
        yield message
        async for _ in requests:
            yield runner_pb2.ServeResponse(pong=runner_pb2.Pong(engine=idle())).SerializeToString()

    server = grpc.aio.server(options=SERVER_OPTIONS)
    method = {"Serve": grpc.stream_stream_rpc_method_handler(serve)}
    service = grpc.method_handlers_generic_handler("pagekeeper.v1.RunnerService", method)
    server.add_generic_rpc_handlers((service,))
    server.add_insecure_port(unix_target(sockets.runner_socket("a")))
    await server.start()
    try:
        async with running_gateway(runtime_dir, model) as client:
            await until(lambda: num_streams == 3)
            assert not client.serving.done()
            assert not await client.is_serving()
    finally:
        await server.stop(None)


async def test_a_lost_stream_that_nobody_resumes_says_how_far_it_got(
    runtime_dir: Path, model: Path, sockets: RuntimeDir
) -> None:
    async with running_gateway(runtime_dir, model, runner_wait_s=0.3) as client:
        async with FakeRunner(sockets.runner_socket("a"), Script(step_s=0.01)):
            await client.until_serving()
            call = client.stub.Generate(prompt_request(PROMPT, seed=1, max_tokens=400))
            responses = aiter(call)
            received = list((await anext(responses)).deltas[0].token_ids)

        async def rest() -> None:
            async for response in responses:
                received.extend(response.deltas[0].token_ids)

        code, status = await failure(rest())
        assert code == grpc.StatusCode.UNAVAILABLE
        assert error_info(status).metadata["tokens_emitted"] == str(len(received))
        assert received == answer_of(1, PROMPT, len(received))
        assert client.admission() == (0, 0)


async def test_a_request_that_takes_every_runner_down_is_given_up(
    runtime_dir: Path, model: Path, sockets: RuntimeDir
) -> None:
    script = Script(tokens_per_step=0, breaks_at=[0] * 9)
    async with FakeRunner(sockets.runner_socket("a"), script) as runner, running_gateway(runtime_dir, model) as client:
        code, status = await failure(client.stub.Generate(prompt_request(PROMPT)))
        # Not UNAVAILABLE: that would have the client try again.
        assert code == grpc.StatusCode.INTERNAL
        assert error_info(status).metadata["error_id"] in status.message
        assert [submit.attempt for submit in runner.submits] == [1, 2, 3, 4, 5]


async def test_a_drain_finishes_what_is_live_and_refuses_what_is_new(
    runtime_dir: Path, model: Path, sockets: RuntimeDir
) -> None:
    script = Script(step_s=0.01)
    async with (
        FakeRunner(sockets.runner_socket("a"), script) as runner,
        running_gateway(runtime_dir, model, grace_s=20.0) as client,
    ):
        call = asyncio.create_task(client.generate(prompt_request(PROMPT, seed=1, max_tokens=50)))
        await until(lambda: runner.live)
        client.stop.set()
        await client.until_serving(False)
        code, status = await failure(client.stub.Generate(prompt_request(PROMPT)))
        assert (code, status.message) == (grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
        assert error_info(status).reason == "DRAINING"
        assert (await call).token_ids == answer_of(1, PROMPT, 50)
        await client.serving


async def test_a_drain_ends_what_outlives_the_grace(runtime_dir: Path, model: Path, sockets: RuntimeDir) -> None:
    script = Script(is_paused=True)
    async with (
        FakeRunner(sockets.runner_socket("a"), script) as runner,
        running_gateway(runtime_dir, model, grace_s=0.1) as client,
    ):
        call = client.stub.Generate(prompt_request(PROMPT))
        await until(lambda: runner.live)
        client.stop.set()
        code, status = await failure(call)
        info = error_info(status)
        assert (code, info.reason, info.metadata["tokens_emitted"]) == (grpc.StatusCode.UNAVAILABLE, "DRAINING", "0")
        await client.serving
        await until(lambda: not runner.live)


async def test_two_gateways_share_runners_and_neither_disturbs_the_other(
    runtime_dir: Path, model: Path, sockets: RuntimeDir
) -> None:
    script = Script(step_s=0.005, breaks_at=[7, 20])
    async with (
        FakeRunner(sockets.runner_socket("a"), script) as runner,
        running_gateway(runtime_dir, model) as one,
        running_gateway(runtime_dir, model) as other,
    ):
        await asyncio.gather(one.until_serving(), other.until_serving())
        request = prompt_request(PROMPT, seed=1, max_tokens=60)
        request.request_id = "mine"  # one name on two gateways is two requests
        calls = [asyncio.create_task(client.generate(request)) for client in (one, other)]
        leaver = one.stub.Generate(prompt_request(PROMPT, max_tokens=400))
        await until(lambda: len(runner.live) >= 3)
        # Both count from 1 upwards.
        assert {submit.request for submit in runner.submits} == {1, 2}
        leaver.cancel()
        for answer in await asyncio.gather(*calls):
            assert answer.token_ids == answer_of(1, PROMPT, 60)
        await until(lambda: not runner.live)


async def test_the_end_of_a_gateway_leaves_the_others_streams_alone(
    runtime_dir: Path, model: Path, sockets: RuntimeDir
) -> None:
    async with (
        FakeRunner(sockets.runner_socket("a"), Script(step_s=0.01)) as runner,
        running_gateway(runtime_dir, model) as stays,
    ):
        async with running_gateway(runtime_dir, model) as goes:
            ended = asyncio.create_task(failure(goes.stub.Generate(prompt_request(PROMPT, max_tokens=400))))
            call = asyncio.create_task(stays.generate(prompt_request(PROMPT, seed=1, max_tokens=100)))
            await until(lambda: len(runner.live) == 2)
            goes.stop.set()
            assert (await ended)[0] == grpc.StatusCode.UNAVAILABLE
            await goes.serving
        assert (await call).token_ids == answer_of(1, PROMPT, 100)
        assert {submit.attempt for submit in runner.submits} == {1}
