"""`pagekeeper up` when something dies, hangs or is replaced: real processes and signals, on a tiny random model."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pagekeeper.cli.server import Server
from pagekeeper.client import AdminClient, Client
from pagekeeper.common.errors import BugError, PagekeeperError
from tests.nothing_left import check_nothing_is_left

LIMIT_S = 60.0
PROCESSES = ("cache_manager", "model_runner", "model_runner_standby", "gateway")
# Far more than a healthy process needs to answer on a busy machine, and short enough to wait for.
HANG_LIMIT_S = 5.0
StartServer = Callable[..., Server]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {LIMIT_S} s: {what}"
        time.sleep(0.05)


def stream(client: Client, max_tokens: int = 600) -> Iterator[int]:
    """Tokens of a greedy answer as they come."""
    deltas = client.generate("The quick brown fox", temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return (token for delta in deltas for token in delta.token_ids)


def answers(server: Server) -> bool:
    try:
        with Client(server.address) as client:
            return len(list(stream(client, 8))) == 8
    except PagekeeperError:
        return False


def events(server: Server, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == event]


def sessions(server: Server) -> dict[str, int]:
    """Pids of the attached runners, by name."""
    with AdminClient(server.admin) as admin:
        return {each["runner_id"].rpartition("-")[0]: each["pid"] for each in admin.stats()["sessions"]}


def is_whole(server: Server) -> bool:
    """Whether every process runs, and both runners are attached."""
    pids = server.pids()
    try:
        attached = sessions(server)
    except PagekeeperError:
        return False
    return set(pids) == set(PROCESSES) and attached == {
        "0": pids["model_runner"],
        "standby": pids["model_runner_standby"],
    }


def test_exactly_the_process_that_hangs_is_replaced(start_server: StartServer) -> None:
    server = start_server("--standby", "--hang-limit-s", str(HANG_LIMIT_S))
    for process in PROCESSES:
        pids = server.pids()
        os.kill(pids[process], signal.SIGSTOP)
        wait_until(lambda pids=pids, process=process: server.pids().get(process, 0) != pids[process], f"{process} ends")
        wait_until(lambda: is_whole(server) and answers(server), f"answers after {process} hung")
        kept = {name: pid for name, pid in pids.items() if name != process}
        assert server.pids().items() >= kept.items()
        assert events(server, "child hangs; killing it")[-1]["pid"] == pids[process]
    check_nothing_is_left(server)


def test_case_37_an_engine_that_fails_ends_its_process_with_1_and_a_request_that_always_does_ends_too(
    start_server: StartServer,
) -> None:
    """Case 37: the engine dies of an exception; the process must not exit 0, nor its request go round for ever."""
    server = start_server(PAGEKEEPER_FAILPOINTS="runner.before_seal=fail", PAGEKEEPER_RUNNER_WAIT_S="150")
    with Client(server.address) as client, pytest.raises(BugError, match="INTERNAL"):
        list(stream(client))
    wait_until(lambda: len(events(server, "child died")) >= 5, "the fifth runner has died, too")
    assert [event["code"] for event in events(server, "child died")] == [1] * 5


def test_a_supervisor_that_was_stopped_kills_nobody(start_server: StartServer) -> None:
    server = start_server("--hang-limit-s", str(HANG_LIMIT_S))
    pids = server.pids()
    os.kill(server.pid, signal.SIGSTOP)
    time.sleep(1.5 * HANG_LIMIT_S)
    os.kill(server.pid, signal.SIGCONT)
    time.sleep(HANG_LIMIT_S / 2)
    assert answers(server)
    assert server.pids() == pids
    assert not events(server, "child hangs; killing it")


def test_the_standby_is_ready_when_the_server_is_and_takes_over_from_a_killed_runner(start_server: StartServer) -> None:
    server = start_server("--standby")
    assert is_whole(server)
    with Client(server.address) as client:
        whole = list(stream(client))
        pids = server.pids()
        deltas = stream(client)
        tokens = [next(deltas)]
        os.kill(pids["model_runner"], signal.SIGKILL)
        tokens += deltas
    assert tokens == whole
    wait_until(lambda: is_whole(server), "the runner is back")
    assert server.pids()["model_runner_standby"] == pids["model_runner_standby"]
    check_nothing_is_left(server)


def test_sighup_replaces_both_runners_under_live_streams(start_server: StartServer) -> None:
    server = start_server("--standby")
    with Client(server.address) as client:
        whole = list(stream(client))
        before = server.pids()
        os.kill(server.pid, signal.SIGHUP)
        answered = 0
        while not (is_whole(server) and both_differ(before, server.pids())):
            assert list(stream(client)) == whole
            answered += 1
            assert answered < 1000
        assert list(stream(client)) == whole
    after = server.pids()
    assert (after["gateway"], after["cache_manager"]) == (before["gateway"], before["cache_manager"])
    assert not events(server, "child died")
    check_nothing_is_left(server)
    os.kill(after["model_runner"], signal.SIGKILL)  # a replacement is supervised like what it replaced
    wait_until(lambda: is_whole(server) and both_differ(after, server.pids(), 1), "the runner is back")


def both_differ(before: dict[str, int], after: dict[str, int], count: int = 2) -> bool:
    return sum(before[name] != after.get(name) for name in ("model_runner", "model_runner_standby")) == count


@contextlib.contextmanager
def replacement(server: Server, model: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`pagekeeper runner --replace` from another shell."""
    (directory,) = {event["runtime_dir"] for event in events(server, "ready") if "runtime_dir" in event}
    command = [sys.executable, "-m", "pagekeeper", "runner", "--replace", "--model", str(model), "--threads", "1"]
    with subprocess.Popen([*command, "--runtime-dir", directory], stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_runner_that_was_replaced_by_hand_comes_back_after_its_successor(
    start_server: StartServer, tiny_model: Path
) -> None:
    server = start_server()
    with Client(server.address) as client, replacement(server, tiny_model) as successor:
        whole = list(stream(client))
        while sessions(server) != {"0": successor.pid}:
            assert list(stream(client)) == whole
        assert "model_runner" not in server.pids()
        assert list(stream(client)) == whole
        successor.terminate()
        assert successor.wait(LIMIT_S) == 0
        wait_until(lambda: sessions(server) == {"0": server.pids().get("model_runner")}, "the runner is back")
        assert list(stream(client)) == whole
    assert not events(server, "child died")
    check_nothing_is_left(server)


def test_a_successor_that_is_not_ours_outlives_us(start_server: StartServer, tiny_model: Path) -> None:
    server = start_server()
    with replacement(server, tiny_model) as successor:
        wait_until(lambda: sessions(server) == {"0": successor.pid}, "the successor serves")
        assert server.stop() == 0
        assert successor.poll() is None


def test_a_second_ctrl_c_ends_everything_at_once_with_130(start_server: StartServer) -> None:
    server = start_server()
    pids = server.pids()
    with Client(server.address) as client:
        next(stream(client, 1900))
        os.kill(server.pid, signal.SIGINT)
        wait_until(lambda: bool(events(server, "draining")), "the gateway drains")
        os.kill(server.pid, signal.SIGINT)
        assert server.stop() == 130
    assert not [pid for pid in pids.values() if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("", "", id="by-itself"),
        # With nohup it serves on, though no line of its log can be shown any more.
        pytest.param(
            "signal.signal(signal.SIGHUP, signal.SIG_IGN)",
            "for order in (signal.SIGHUP, signal.SIGTERM): time.sleep(1); os.kill(pid, order)",
            id="when-told",
        ),
    ],
)
def test_when_the_terminal_closes_everything_ends(tiny_model: Path, runtime_dir: Path, before: str, after: str) -> None:
    flags = ["--model", str(tiny_model), "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
    program = (
        f"import os, pty, signal, sys, time\n{before}\n"
        "pid, terminal = pty.fork()\n"
        f"if not pid: os.execv(sys.executable, [sys.executable, '-m', 'pagekeeper', 'up', *{flags}])\n"
        "shown = b''\n"
        "while b'ready  grpc=' not in shown: shown += os.read(terminal, 4096)\n"
        f"os.close(terminal)\n{after}\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    environment = os.environ | {"XDG_RUNTIME_DIR": str(runtime_dir), "PAGEKEEPER_THREADS": "1"}
    assert (
        subprocess.run([sys.executable, "-c", program], env=environment, timeout=LIMIT_S, check=False).returncode == 0
    )
    assert not list(runtime_dir.iterdir())


def test_a_drain_in_which_a_process_has_to_be_killed_is_no_success(start_server: StartServer) -> None:
    failpoints = {"PAGEKEEPER_FAILPOINTS": f"gateway.before_submit=sleep:{LIMIT_S}"}
    server = start_server("--grace-s", "0", **failpoints)
    with contextlib.suppress(PagekeeperError), Client(server.address) as client:
        next(client.generate("The quick brown fox", timeout_s=1.0))
    assert server.stop() == 1


def test_case_37_a_process_that_ends_before_it_is_ready_fails_the_start(tiny_model: Path) -> None:
    """Case 37: a dead engine's process exits 0, and nobody acts."""
    command = [sys.executable, "-m", "pagekeeper", "up", "--model", str(tiny_model), "--listen", "127.0.0.1:0"]
    with subprocess.Popen(
        [*command, "--admin-listen", "127.0.0.1:0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as up:
        wait_until(lambda: runner_of(up.pid) is not None, "a runner starts")
        os.kill(runner_of(up.pid) or 0, signal.SIGTERM)
        _, log = up.communicate(timeout=LIMIT_S)
    assert up.returncode == 1
    assert "before it was ready; its log says why" in log


def runner_of(up: int) -> int | None:
    for pid in Path(f"/proc/{up}/task/{up}/children").read_text().split():
        if "model_runner" in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
            return int(pid)
    return None
