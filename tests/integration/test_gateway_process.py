"""`python -m gateway` as a process: how it starts, refuses to start, and ends."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from pagekeeper.common.sockets import RuntimeDir
from pagekeeper.v1 import generate_pb2_grpc
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
