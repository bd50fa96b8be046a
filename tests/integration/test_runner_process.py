"""The real runner process beside a real cache manager."""

import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from pagekeeper.common.sockets import RuntimeDir, unix_target
from pagekeeper.v1 import runner_pb2, runner_pb2_grpc
from tests.fakes.manager import ManagerProcess
from tests.models import write_tiny_model

LIMIT_S = 40.0
POOL = ("--pool-size", "8MiB")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@contextmanager
def runner(runtime_dir: Path, model_path: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "model_runner", "--runtime-dir", str(runtime_dir), "--model", str(model_path)]
    process = subprocess.Popen(
        [*command, *flags], stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def engine_state(runtime_dir: Path) -> runner_pb2.EngineReport:
    target = unix_target(RuntimeDir(runtime_dir).runner_socket("0"))
    ping = runner_pb2.ServeRequest(ping=runner_pb2.Ping(nonce=1))
    with grpc.insecure_channel(target) as channel:
        for response in runner_pb2_grpc.RunnerServiceStub(channel).Serve(iter([ping]), timeout=LIMIT_S):
            if response.HasField("pong"):
                return response.pong.engine
    raise AssertionError("no pong")


def num_sessions(manager: ManagerProcess) -> int:
    return len(manager.stats().sessions)


def mapped_pools(pid: int) -> int:
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sum("memfd:" in line for line in maps)


def test_an_idle_runner_survives_its_managers_and_keeps_one_pool_mapped(runtime_dir: Path, model_path: Path) -> None:
    with ManagerProcess(runtime_dir, *POOL) as first, runner(runtime_dir, model_path) as process:
        until(lambda: num_sessions(first) == 1)
        for _ in range(2):
            first.process.kill()
            first.process.wait()
            with ManagerProcess(runtime_dir, *POOL) as second:
                until(lambda manager=second: num_sessions(manager) == 1)  # type: ignore[misc]  # bound per turn
                until(lambda: mapped_pools(process.pid) == 1)
                second.process.kill()
                second.process.wait()
        assert process.poll() is None


def test_a_stopped_manager_is_what_an_idle_runner_waits_for(runtime_dir: Path, model_path: Path) -> None:
    waiting, idle = runner_pb2.EngineReport.STATE_WAITING_FOR_MANAGER, runner_pb2.EngineReport.STATE_IDLE
    with ManagerProcess(runtime_dir, *POOL) as manager, runner(runtime_dir, model_path):
        until(lambda: num_sessions(manager) == 1)
        until(RuntimeDir(runtime_dir).runner_socket("0").exists)
        manager.process.send_signal(signal.SIGSTOP)
        until(lambda: engine_state(runtime_dir).state == waiting)
        manager.process.send_signal(signal.SIGCONT)
        until(lambda: engine_state(runtime_dir).state == idle)


def test_a_second_runner_of_the_same_name_is_turned_away(runtime_dir: Path, model_path: Path) -> None:
    with ManagerProcess(runtime_dir, *POOL) as manager, runner(runtime_dir, model_path):
        until(lambda: num_sessions(manager) == 1)
        with runner(runtime_dir, model_path) as second:
            assert second.wait(LIMIT_S) == 2
            assert second.stderr is not None
            assert "another runner-0 serves" in second.stderr.read()
        with runner(runtime_dir, model_path, "--name", "1"):
            until(lambda: num_sessions(manager) == 2)


@pytest.mark.parametrize(
    ("flags", "pool", "words"),
    [
        (("--model", "/no/such/model"), POOL, "/no/such/model"),
        (("--block-size", "24"), POOL, "block_size"),
        (("--device", "cuda"), POOL, "device: cuda cannot be used"),
        (("--kv-dtype", "float8_e4m3fn"), POOL, "kernels 'cpu' keep K and V in float32, not torch.float8_e4m3fn"),
        ((), ("--pool-size", "20KiB"), "pool_size"),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_code_2(
    runtime_dir: Path, model_path: Path, flags: tuple[str, ...], pool: tuple[str, ...], words: str
) -> None:
    with ManagerProcess(runtime_dir, *pool), runner(runtime_dir, model_path, *flags) as process:
        _, stderr = process.communicate(timeout=LIMIT_S)
        lines = [line for line in stderr.splitlines() if not line.startswith("{")]
        assert process.returncode == 2
        assert len(lines) == 1
        assert words in lines[0]


def test_a_socket_that_cannot_be_bound_is_one_line_and_exit_code_2(runtime_dir: Path, model_path: Path) -> None:
    RuntimeDir(runtime_dir).runner_socket("0").mkdir()
    with ManagerProcess(runtime_dir, *POOL) as manager, runner(runtime_dir, model_path) as process:
        _, stderr = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 2
        assert "cannot listen on" in stderr.splitlines()[-1]
        until(lambda: num_sessions(manager) == 0)


def test_case_37_a_dead_engine_is_a_non_zero_exit_code(runtime_dir: Path, model_path: Path) -> None:
    """Case 37: the engine dies and the process exits 0: a restart on failure would not act."""
    with ManagerProcess(runtime_dir, *POOL) as manager, runner(runtime_dir, model_path) as process:
        until(lambda: num_sessions(manager) == 1)
        until(RuntimeDir(runtime_dir).runner_socket("0").exists)
        manager.process.kill()
        manager.process.wait()
        with ManagerProcess(runtime_dir, "--pool-size", "256KiB"):
            _, stderr = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 2
        assert "holds less" in stderr


def test_a_runner_without_a_manager_gives_up_with_exit_code_1(runtime_dir: Path, model_path: Path) -> None:
    with runner(runtime_dir, model_path, "--manager-wait-s", "0.5") as process:
        _, stderr = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 1
        assert "no cache manager" in stderr


def test_sigterm_lets_a_running_sequence_finish(runtime_dir: Path, model_path: Path) -> None:
    with ManagerProcess(runtime_dir, *POOL) as manager, runner(runtime_dir, model_path) as process:
        until(lambda: num_sessions(manager) == 1)
        until(RuntimeDir(runtime_dir).runner_socket("0").exists)
        sampling = runner_pb2.ResolvedSampling(top_p=1.0, max_tokens=400)
        submit = runner_pb2.Submit(request=1, attempt=1, tenant="t", prompt_token_ids=[5] * 10, sampling=sampling)
        tokens = 0
        with grpc.insecure_channel(unix_target(RuntimeDir(runtime_dir).runner_socket("0"))) as channel:
            requests: queue.SimpleQueue[runner_pb2.ServeRequest | None] = queue.SimpleQueue()
            requests.put(runner_pb2.ServeRequest(submit=submit))
            call = runner_pb2_grpc.RunnerServiceStub(channel).Serve(iter(requests.get, None), timeout=LIMIT_S)
            for response in call:
                if response.HasField("step"):
                    if not tokens:
                        process.terminate()
                    tokens += sum(len(output.token_ids) for output in response.step.outputs)
            requests.put(None)
        assert tokens == 400
        assert process.wait(LIMIT_S) == 0


def test_sigterm_drains_and_exits_0(runtime_dir: Path, model_path: Path) -> None:
    with ManagerProcess(runtime_dir, *POOL) as manager, runner(runtime_dir, model_path) as process:
        until(RuntimeDir(runtime_dir).runner_socket("0").exists)
        until(lambda: engine_state(runtime_dir).state == runner_pb2.EngineReport.STATE_IDLE)
        process.terminate()
        assert process.wait(LIMIT_S) == 0
        until(lambda: num_sessions(manager) == 0)
