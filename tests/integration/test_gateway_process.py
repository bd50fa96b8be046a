"""`python -m gateway` as a process: how it starts, refuses to start, and ends."""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagekeeper.common.sockets import RuntimeDir
from pagekeeper.v1 import generate_pb2_grpc
from pagekeeper.v1.generate_pb2 import GenerateRequest, Resume
from tests.fakes.gateway import Answer, prompt_request, until
from tests.fakes.gateway_process import ROOT, started
from tests.fakes.runner import FakeRunner, Script, answer_of
from tests.fakes.tokenizer import write_model_directory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model_directory(tmp_path / "tiny")


async def test_sigterm_drains_and_the_process_ends_with_zero(runtime_dir: Path, model: Path) -> None:
    async with (
        FakeRunner(RuntimeDir(runtime_dir).runner_socket("a"), Script(step_s=0.01)) as runner,
        started(runtime_dir, model) as (process, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        answer = Answer()
        call = generate_pb2_grpc.GenerateServiceStub(channel).Generate(prompt_request([5], seed=1, max_tokens=50))
        async for response in call:
            if not answer.num_messages:
                process.send_signal(signal.SIGTERM)
            answer.take(response)
        assert answer.token_ids == answer_of(1, [5], 50)
        assert await process.wait() == 0
        await until(lambda: not runner.live)


async def test_a_killed_gateway_leaves_nothing_at_the_runner(runtime_dir: Path, model: Path) -> None:
    async with (
        FakeRunner(RuntimeDir(runtime_dir).runner_socket("a"), Script(is_paused=True)) as runner,
        started(runtime_dir, model) as (process, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        call = generate_pb2_grpc.GenerateServiceStub(channel).Generate(prompt_request([5]))
        await until(lambda: runner.live)
        process.kill()
        await until(lambda: not runner.live)
        call.cancel()


async def received(call: "grpc.aio.UnaryStreamCall") -> Answer:
    """What a stream brings before it ends or breaks."""
    answer = Answer()
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for response in call:
            answer.take(response)
    return answer


def resuming(answer: Answer, **sampling: int) -> GenerateRequest:
    request = prompt_request([5], **sampling)
    request.request_id = answer.request_id
    request.resume.CopyFrom(Resume(candidates=[Resume.Candidate(token_ids=answer.token_ids)], seed=answer.seed or 0))
    return request


async def test_a_killed_gateways_successor_serves_on_the_same_port_at_once_and_resumes_its_streams(
    runtime_dir: Path, model: Path
) -> None:
    socket_path = RuntimeDir(runtime_dir).runner_socket("a")
    async with AsyncExitStack() as stack:
        async with FakeRunner(socket_path, Script(step_s=0.01)) as runner:
            process, address = await stack.enter_async_context(started(runtime_dir, model))
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
            stub = generate_pb2_grpc.GenerateServiceStub(channel)
            calls = [stub.Generate(prompt_request([5], seed=seed, max_tokens=150)) for seed in range(4)]
            reading = [asyncio.create_task(received(call)) for call in calls]
            await until(lambda: len(runner.live) == 4)
            # With clients connected: their ends of the port are still there when it is taken again.
            process.kill()
            broken = await asyncio.gather(*reading)
            await until(lambda: not runner.live)
        _, same = await stack.enter_async_context(started(runtime_dir, model, listen=address))
        assert same == address
        fresh = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        health = health_pb2_grpc.HealthStub(fresh)
        response = await health.Check(health_pb2.HealthCheckRequest())
        assert response.status == health_pb2.HealthCheckResponse.NOT_SERVING
        async with FakeRunner(socket_path):
            stub = generate_pb2_grpc.GenerateServiceStub(fresh)
            for seed, answer in enumerate(broken):
                rest = await received(stub.Generate(resuming(answer, seed=seed, max_tokens=150)))
                assert [*answer.token_ids, *rest.token_ids] == answer_of(seed, [5], 150)
            response = await health.Check(health_pb2.HealthCheckRequest())
            assert response.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(
    ("point", "num_tokens"), [("before_submit=kill", 0), ("after_tokens=kill@4", 3), ("after_emit=kill@4", 4)]
)
async def test_a_gateway_killed_at_any_boundary_loses_no_token(
    runtime_dir: Path, model: Path, point: str, num_tokens: int
) -> None:
    environment = {"PAGEKEEPER_FAILPOINTS": f"gateway.{point}"}
    async with (
        # Slowly, so that each token is a message of its own.
        FakeRunner(RuntimeDir(runtime_dir).runner_socket("a"), Script(step_s=0.05)) as runner,
        started(runtime_dir, model, **environment) as (process, address),
        started(runtime_dir, model) as (_, other),
        grpc.aio.insecure_channel(address) as broken,
        grpc.aio.insecure_channel(other) as channel,
    ):
        call = generate_pb2_grpc.GenerateServiceStub(broken).Generate(prompt_request([5], seed=1, max_tokens=20))
        answer = await received(call)
        assert await process.wait() == -signal.SIGKILL
        # What was given to the stream may die with the process, too.
        assert len(answer.token_ids) <= num_tokens
        runner.script.step_s = 0.0
        rest = await received(
            generate_pb2_grpc.GenerateServiceStub(channel).Generate(resuming(answer, seed=1, max_tokens=20))
        )
        assert [*answer.token_ids, *rest.token_ids] == answer_of(1, [5], 20)


async def test_a_stopped_gateway_that_goes_on_blames_no_runner(runtime_dir: Path, model: Path) -> None:
    async with (
        FakeRunner(RuntimeDir(runtime_dir).runner_socket("a"), Script(step_s=0.01)) as runner,
        started(runtime_dir, model) as (process, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        call = generate_pb2_grpc.GenerateServiceStub(channel).Generate(prompt_request([5], seed=1, max_tokens=100))
        reading = asyncio.create_task(received(call))
        await until(lambda: runner.live)
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(2.5)  # longer than a runner may be silent
        process.send_signal(signal.SIGCONT)
        assert (await reading).token_ids == answer_of(1, [5], 100)
        assert [submit.attempt for submit in runner.submits] == [1]


@pytest.mark.parametrize("fault", ["busy port", "no model", "no tokenizer", "open runtime dir", "no such host"])
def test_a_wrong_configuration_is_one_line_and_code_two(runtime_dir: Path, model: Path, fault: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}" if fault == "busy port" else "127.0.0.1:0"
        if fault == "no such host":
            listen = "no-such-host.invalid:0"
        if fault == "no model":
            model = model / "nowhere"
        if fault == "no tokenizer":
            (model / "tokenizer.json").unlink()
        if fault == "open runtime dir":
            runtime_dir.chmod(0o755)
        flags = ("--runtime-dir", str(runtime_dir), "--model", str(model), "--listen", listen)
        ended = subprocess.run(
            [sys.executable, "-m", "gateway", *flags], cwd=ROOT, capture_output=True, text=True, check=False
        )
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    named = {"busy port": listen, "no such host": listen, "open runtime dir": "runtime_dir"}.get(fault, str(model))
    assert named in line
