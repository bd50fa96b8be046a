"""`pagekeeper up` as a person runs it: real processes, on a tiny random model."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pagekeeper.cli.server import Server, ServerFailedError
from pagekeeper.client import Client
from pagekeeper.common.errors import PagekeeperError

LIMIT_S = 60.0
StartServer = Callable[..., Server]


def run(*command: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pagekeeper", *command],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        **options,
    )


def answer(server: Server, prompt: str = "The quick brown fox", max_tokens: int = 8) -> list[int]:
    with Client(server.address) as client:
        deltas = client.generate(prompt, temperature=0, max_tokens=max_tokens, ignore_eos=True)
        return [token for delta in deltas for token in delta.token_ids]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {LIMIT_S} s: {what}"
        time.sleep(0.05)


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def one_error_line(log: str) -> str:
    """The line that is not log."""
    lines = [line for line in log.splitlines() if not line.startswith("{")]
    assert len(lines) == 1, log
    return lines[0]


def test_the_three_processes_answer_over_grpc(stack: Server) -> None:
    assert set(stack.pids()) == {"cache_manager", "model_runner", "gateway"}
    assert len(answer(stack)) == 8


def test_the_ready_line_and_every_process_agree_on_the_device(start_server: StartServer) -> None:
    server = start_server("--device", "cpu")
    assert server.device == "cpu"
    pids = server.pids()
    for module in ("cache_manager", "model_runner"):
        flags = Path(f"/proc/{pids[module]}/cmdline").read_text().split("\0")
        assert flags[flags.index("--device") + 1] == "cpu"


def test_a_misspelt_variable_is_warned_of_once_for_all_processes(start_server: StartServer) -> None:
    server = start_server(PAGEKEEPER_POOLSIZE="1GiB")
    assert server.log.read_text().count("PAGEKEEPER_POOLSIZE is no setting") == 1


def test_a_gpu_that_was_asked_for_and_is_not_there_is_one_line_and_exit_code_2(start_server: StartServer) -> None:
    # Hidden, should this machine have one.
    with pytest.raises(ServerFailedError) as failed:
        start_server("--device", "cuda", CUDA_VISIBLE_DEVICES="-1")
    assert failed.value.code == 2
    assert "device: cuda cannot be used: " in one_error_line(failed.value.log)


def test_auto_takes_the_cpu_where_there_is_no_gpu_and_says_why(start_server: StartServer) -> None:
    server = start_server("--device", "auto", CUDA_VISIBLE_DEVICES="-1")
    assert server.device == "cpu"
    events = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
    (chosen,) = (event for event in events if event["event"] == "device chosen")
    assert chosen["device"] == "cpu"
    assert "NVIDIA" in chosen["reason"] or "missing" in chosen["reason"]


def test_generate_prints_json_that_adds_up(stack: Server) -> None:
    done = run("generate", "The quick", "--max-tokens", "5", "--json", "--seed", "3", "--server", stack.address)
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert [candidate["index"] for candidate in result["candidates"]] == [0]
    assert result["seed"] == 3
    assert result["usage"]["completion_tokens"] == sum(len(c["token_ids"]) for c in result["candidates"])
    assert {candidate["finish_reason"] for candidate in result["candidates"]} <= {"stop", "length"}


def test_stats_name_the_attached_runner(stack: Server) -> None:
    done = run("stats", "--json", "--server", stack.admin)
    assert (done.returncode, done.stderr) == (0, "")
    stats = json.loads(done.stdout)
    assert stats["pool"]["block_size"] == 16
    assert [session["pid"] for session in stats["sessions"]] == [stack.pids()["model_runner"]]


def test_watched_stats_are_one_json_object_a_line_until_interrupted(stack: Server) -> None:
    command = [sys.executable, "-m", "pagekeeper", "stats", "--watch", "--json", "--server", stack.admin]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        lines = [json.loads(watching.stdout.readline()) for _ in range(2)]
        watching.send_signal(signal.SIGINT)
        watching.communicate(timeout=LIMIT_S)
    assert watching.returncode == 130
    assert lines[0]["server"] == lines[1]["server"]


def test_health_takes_either_address(stack: Server) -> None:
    assert run("health", "--server", stack.address).returncode == 0
    assert run("health", "--server", stack.admin).returncode == 0


def test_a_refused_request_is_one_line(stack: Server) -> None:
    done = run("generate", "", "--server", stack.address)
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1


def test_an_interrupted_generate_exits_130_and_gives_its_blocks_back(stack: Server) -> None:
    command = [sys.executable, "-m", "pagekeeper", "generate", "The quick", "--max-tokens", "1500"]
    with subprocess.Popen([*command, "--server", stack.address], stdout=subprocess.PIPE) as generating:
        assert generating.stdout is not None
        generating.stdout.read(1)
        generating.send_signal(signal.SIGINT)
        generating.communicate(timeout=LIMIT_S)
    assert generating.returncode == 130


@pytest.mark.parametrize("process", ["cache_manager", "model_runner", "gateway"])
def test_a_killed_process_is_restarted_and_answers_as_before(start_server: StartServer, process: str) -> None:
    server = start_server()
    before, pids = answer(server), server.pids()
    os.kill(pids[process], signal.SIGKILL)

    def answers_again() -> bool:
        if server.pids().get(process) in (None, pids[process]):
            return False
        try:
            return answer(server) == before
        except PagekeeperError:
            return False

    wait_until(answers_again, f"answers after {process} was killed")
    others = {name: pid for name, pid in pids.items() if name != process}
    assert server.pids().items() >= others.items()


def test_sigterm_lets_a_running_answer_finish_and_leaves_nothing_behind(start_server: StartServer) -> None:
    server = start_server()
    pids = server.pids()
    with Client(server.address) as client:
        deltas = client.generate("The quick brown fox", temperature=0, max_tokens=200, ignore_eos=True)
        tokens = list(next(deltas).token_ids)
        os.kill(server.pid, signal.SIGTERM)
        tokens += [token for delta in deltas for token in delta.token_ids]
    assert len(tokens) == 200
    assert server.stop() == 0
    assert not [pid for pid in pids.values() if exists(pid)]


def test_nothing_outlives_a_killed_supervisor(start_server: StartServer, runtime_dir: Path) -> None:
    server = start_server("--runtime-dir", str(runtime_dir))
    pids = server.pids()
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: not [pid for pid in pids.values() if exists(pid)], "every child ends")


def test_a_fresh_runtime_directory_is_private_and_removed(start_server: StartServer, runtime_dir: Path) -> None:
    server = start_server(XDG_RUNTIME_DIR=str(runtime_dir))
    (fresh,) = runtime_dir.iterdir()
    assert fresh.stat().st_mode & 0o777 == 0o700
    server.stop()
    assert not list(runtime_dir.iterdir())


def test_a_busy_port_is_named_and_ends_up_with_exit_code_2(start_server: StartServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        address = "{}:{}".format(*busy.getsockname())
        for flag in ("--listen", "--admin-listen"):
            with pytest.raises(ServerFailedError) as failed:
                start_server(flag, address)
            assert failed.value.code == 2
            assert address in one_error_line(failed.value.log)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "/no/such/model"], "model: there is no /no/such/model"),
        (["--pool-size", "many"], "pool_size"),
        (["--pool-size", "1KiB"], "pool_size"),
        (["--pool-memory", "paper"], "pool_memory"),
        (["--device", "cpu", "--pool-memory", "cuda_ipc"], "pool_memory"),
        (["--runtime-dir", "/proc/pagekeeper"], "runtime_dir"),
        (["--runtime-dir", "/tmp/" + "x" * 100], "runtime_dir"),
        (["--listen", "nonsense"], "listen"),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_code_2(start_server: StartServer, flags: list[str], words: str) -> None:
    with pytest.raises(ServerFailedError) as failed:
        start_server(*flags)
    assert failed.value.code == 2
    assert words in one_error_line(failed.value.log)


def test_a_model_directory_without_a_model_is_one_line_and_exit_code_2(
    start_server: StartServer, tmp_path: Path
) -> None:
    with pytest.raises(ServerFailedError) as failed:
        start_server(model=tmp_path)
    assert failed.value.code == 2
    assert str(tmp_path) in one_error_line(failed.value.log)


def test_a_missing_demo_model_says_how_to_fetch_it(tmp_path: Path) -> None:
    done = run("up", env=os.environ | {"PAGEKEEPER_HOME": str(tmp_path)})
    assert done.returncode == 2
    assert re.fullmatch(r"pagekeeper: model: .* run `pagekeeper model fetch smollm2`.*\n", done.stderr)


def test_a_start_that_takes_too_long_is_given_up(start_server: StartServer) -> None:
    with pytest.raises(ServerFailedError, match=r"not serving after 0\.01 s") as failed:
        start_server("--start-limit-s", "0.01")
    assert failed.value.code == 1


def test_sigterm_during_the_start_ends_it_at_once(tiny_model: Path) -> None:
    command = [sys.executable, "-m", "pagekeeper", "up", "--model", str(tiny_model), "--listen", "127.0.0.1:0"]
    with subprocess.Popen(
        [*command, "--admin-listen", "127.0.0.1:0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as up:
        children = Path(f"/proc/{up.pid}/task/{up.pid}/children")
        wait_until(lambda: len(children.read_text().split()) == 3, "three children")
        pids = [int(pid) for pid in children.read_text().split()]
        up.send_signal(signal.SIGTERM)
        assert up.communicate(timeout=LIMIT_S)[0] == b""
    assert up.returncode == 0
    assert not [pid for pid in pids if exists(pid)]


def test_an_installed_command_is_the_same_program() -> None:
    command = shutil.which("pagekeeper", path=str(Path(sys.executable).parent))
    assert command is not None
    done = subprocess.run([command, "--help"], capture_output=True, text=True, check=True)
    assert "cache-manager" in done.stdout
