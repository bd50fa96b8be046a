"""The runner process beside a real cache manager: how it starts, what it survives, and how it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pagekeeper.common.sockets import RuntimeDir
from pagekeeper.v1 import runner_pb2
from tests.fakes.manager import ManagerProcess
from tests.fakes.resubmitting_gateway import ResubmittingGateway
from tests.fakes.runner_process import LIMIT_S, RunnerSpawner, until

POOL = ("--pool-size", "8MiB")
IDLE = runner_pb2.EngineReport.STATE_IDLE
WAITING = runner_pb2.EngineReport.STATE_WAITING_FOR_MANAGER


def num_sessions(manager: ManagerProcess) -> int:
    return len(manager.stats().sessions)


def mapped_pools(pid: int) -> int:
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sum("memfd:" in line for line in maps)


def test_the_program_starts_serves_and_drains(runtime_dir: Path, tiny_model: Path) -> None:
    command = [sys.executable, "-m", "model_runner", "--runtime-dir", str(runtime_dir), "--model", str(tiny_model)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (
        ManagerProcess(runtime_dir, *POOL),
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process,
        ResubmittingGateway(RuntimeDir(runtime_dir).runner_socket("0")) as gateway,
    ):
        assert len(gateway.wait([gateway.submit([5] * 10, 9)])[0][0]) == 9
        process.terminate()
        _, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0
    assert [line for line in stderr.splitlines() if not line.startswith("{")] == []


def test_a_runner_says_what_it_is_for(spawner: RunnerSpawner, runtime_dir: Path) -> None:
    with (
        ManagerProcess(runtime_dir, *POOL),
        spawner.started(runtime_dir) as plain,
        spawner.started(runtime_dir, "--role", "prefill", "--standby", name="1") as other,
        ResubmittingGateway(plain.socket) as first,
        ResubmittingGateway(other.socket) as second,
    ):
        until(lambda: first.hellos and second.hellos)
        assert (first.hellos[0].role, first.hellos[0].standby) == (runner_pb2.ROLE_BOTH, False)
        assert (second.hellos[0].role, second.hellos[0].standby) == (runner_pb2.ROLE_PREFILL, True)


# What it survives


def test_an_idle_runner_survives_its_managers_and_keeps_one_pool_mapped(
    spawner: RunnerSpawner, runtime_dir: Path
) -> None:
    with ManagerProcess(runtime_dir, *POOL) as first, spawner.started(runtime_dir) as runner:
        until(lambda: num_sessions(first) == 1)
        for _ in range(2):
            first.process.kill()
            first.process.wait()
            with ManagerProcess(runtime_dir, *POOL) as second:
                until(lambda manager=second: num_sessions(manager) == 1)  # type: ignore[misc]  # bound per turn
                until(lambda: mapped_pools(runner.pid) == 1)
                second.process.kill()
                second.process.wait()
        assert runner.exit_code() is None


def test_a_stopped_manager_is_what_an_idle_runner_waits_for(spawner: RunnerSpawner, runtime_dir: Path) -> None:
    with ManagerProcess(runtime_dir, *POOL) as manager, spawner.started(runtime_dir) as runner:
        runner.wait_until_ready()
        manager.process.send_signal(signal.SIGSTOP)
        until(lambda: runner.report().state == WAITING)
        manager.process.send_signal(signal.SIGCONT)
        until(lambda: runner.report().state == IDLE)


def test_a_second_runner_of_the_same_name_is_turned_away(spawner: RunnerSpawner, runtime_dir: Path) -> None:
    with ManagerProcess(runtime_dir, *POOL) as manager, spawner.started(runtime_dir) as first:
        first.wait_until_ready()
        with spawner.started(runtime_dir) as second:
            assert second.wait() == 2
            assert second.errors() == [f"runner: runtime_dir: another runner-0 serves {runtime_dir}"]
        with spawner.started(runtime_dir, name="1"):
            until(lambda: num_sessions(manager) == 2)


# How it ends


@pytest.mark.parametrize(
    ("flags", "pool", "words"),
    [
        (("--model", "/no/such/model"), POOL, "/no/such/model"),
        (("--block-size", "24"), POOL, "block_size"),
        (("--role", "cook"), POOL, "role"),
        (("--device", "cuda"), POOL, "device: cuda cannot be used"),
        (("--kv-dtype", "float8_e4m3fn"), POOL, "kernels 'cpu' keep K and V in float32, not torch.float8_e4m3fn"),
        ((), ("--pool-size", "20KiB"), "pool_size"),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_code_2(
    spawner: RunnerSpawner, runtime_dir: Path, flags: tuple[str, ...], pool: tuple[str, ...], words: str
) -> None:
    with ManagerProcess(runtime_dir, *pool), spawner.started(runtime_dir, *flags) as runner:
        assert runner.wait() == 2
        (line,) = runner.errors()
        assert words in line


def test_a_socket_that_cannot_be_bound_is_one_line_and_exit_code_2(spawner: RunnerSpawner, runtime_dir: Path) -> None:
    RuntimeDir(runtime_dir).runner_socket("0").mkdir()
    with ManagerProcess(runtime_dir, *POOL) as manager, spawner.started(runtime_dir) as runner:
        assert runner.wait() == 2
        (line,) = runner.errors()
        assert "cannot listen on" in line
        until(lambda: num_sessions(manager) == 0)


def test_case_37_a_dead_engine_is_a_non_zero_exit_code(spawner: RunnerSpawner, runtime_dir: Path) -> None:
    """Case 37: the engine dies and the process exits 0: a restart on failure would not act."""
    with ManagerProcess(runtime_dir, *POOL) as manager, spawner.started(runtime_dir) as runner:
        runner.wait_until_ready()
        manager.process.kill()
        manager.process.wait()
        with ManagerProcess(runtime_dir, "--pool-size", "256KiB"):
            assert runner.wait() == 1
        (line,) = runner.errors()
        assert "holds less" in line


def test_a_runner_to_whom_no_manager_comes_gives_up_with_one_line_and_exit_code_1(
    spawner: RunnerSpawner, runtime_dir: Path
) -> None:
    with spawner.started(runtime_dir, "--manager-wait-s", "0.5") as runner:
        assert runner.wait() == 1
        (line,) = runner.errors()
        assert f"no cache manager serves {runtime_dir}" in line


def test_a_runner_whose_manager_does_not_come_back_gives_up_with_one_line_and_exit_code_1(
    spawner: RunnerSpawner, runtime_dir: Path
) -> None:
    with (
        ManagerProcess(runtime_dir, *POOL) as manager,
        spawner.started(runtime_dir, "--manager-wait-s", "0.5") as runner,
        ResubmittingGateway(runner.socket) as gateway,
    ):
        stream = gateway.submit([5] * 10, 1500)
        until(lambda: stream.num_tokens > 5)
        manager.process.kill()
        assert runner.wait() == 1
        (line,) = runner.errors()
        assert f"no cache manager serves {runtime_dir}" in line


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_before_it_serves_a_signal_ends_it_at_once(
    spawner: RunnerSpawner, runtime_dir: Path, number: signal.Signals
) -> None:
    with spawner.started(runtime_dir) as runner:
        until(lambda: runner.has_logged("model loaded"))  # now it waits for a manager
        runner.signal(number)
        assert runner.wait() == 0
        assert runner.errors() == []


def test_sigterm_lets_a_running_sequence_finish(spawner: RunnerSpawner, runtime_dir: Path) -> None:
    with (
        ManagerProcess(runtime_dir, *POOL),
        spawner.started(runtime_dir) as runner,
        ResubmittingGateway(runner.socket) as gateway,
    ):
        stream = gateway.submit([5] * 10, 600)
        until(lambda: stream.num_tokens > 5)
        runner.signal(signal.SIGTERM)
        assert len(gateway.wait([stream])[0][0]) == 600
        assert runner.wait() == 0
        assert gateway.drains == 1
        assert len(gateway.hellos) == 1


def test_what_does_not_finish_within_the_grace_is_ended_and_released(spawner: RunnerSpawner, runtime_dir: Path) -> None:
    with (
        ManagerProcess(runtime_dir, *POOL) as manager,
        spawner.started(runtime_dir, "--grace-s", "0.2") as runner,
        ResubmittingGateway(runner.socket) as gateway,
    ):
        stream = gateway.submit([5] * 10, 2000)
        until(lambda: stream.num_tokens > 5)
        runner.signal(signal.SIGTERM)
        assert runner.wait() == 0
        pool = manager.stats().pool
        assert pool.free_blocks == pool.total_blocks - 1
        # What it had computed of an unfinished block can be found as well.
        assert pool.cached_blocks >= 1 + stream.num_tokens // 16


def test_a_signal_ends_a_runner_that_waits_for_its_manager(spawner: RunnerSpawner, runtime_dir: Path) -> None:
    with ManagerProcess(runtime_dir, *POOL) as manager, spawner.started(runtime_dir) as runner:
        runner.wait_until_ready()
        manager.process.send_signal(signal.SIGSTOP)
        until(lambda: runner.report().state == WAITING)
        runner.signal(signal.SIGTERM)
        assert runner.wait() == 0
        manager.process.send_signal(signal.SIGCONT)
        until(lambda: num_sessions(manager) == 0)
