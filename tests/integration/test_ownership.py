"""Who owns what when runners and managers die, stop or come back: real processes, signals at random points."""

import random
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import grpc
import pytest

from cache_manager import wire
from cache_manager.client import CacheConnectionLost
from pagekeeper.client import Client
from pagekeeper.common.sockets import RuntimeDir, unix_target
from pagekeeper.v1 import admin_pb2, cache_pb2_grpc, runner_pb2
from tests.fakes.cycles import num_cycles
from tests.fakes.local_cache import FINGERPRINT, TINY_LAYOUT
from tests.fakes.manager import POOL as TINY_POOL
from tests.fakes.manager import ManagerProcess, connect, message
from tests.fakes.policy_session import opening, tokens
from tests.fakes.resubmitting_gateway import ResubmittingGateway, Stream
from tests.fakes.runner_process import LIMIT_S, RunnerProcess, RunnerSpawner, until

POOL = ("--pool-size", "4MiB")
BLOCK_SIZE = 16
WAITING = runner_pb2.EngineReport.STATE_WAITING_FOR_MANAGER
PROMPTS = [random.Random(index).choices(range(3, 384), k=20 + 13 * index) for index in range(6)]


@pytest.fixture
def manager(runtime_dir: Path) -> Iterator[ManagerProcess]:
    with ManagerProcess(runtime_dir, *POOL) as process:
        yield process


def begin(gateway: ResubmittingGateway, max_tokens: int = 300) -> list[Stream]:
    return [gateway.submit(prompt, max_tokens) for prompt in PROMPTS]


def wait_for_tokens(streams: list[Stream], count: int) -> None:
    until(lambda: min(stream.num_tokens for stream in streams) >= count)


def check_nothing_is_left(manager: ManagerProcess) -> None:
    until(lambda: manager.stats().pool.free_blocks == manager.stats().pool.total_blocks - 1)
    assert list(manager.audit().violations) == []


def sequences_of(manager: ManagerProcess, pid: int) -> int:
    sessions = manager.admin.ListSessions(admin_pb2.ListSessionsRequest(), timeout=10).sessions
    return sum(details.sequences for details in sessions if details.session.pid == pid)


def mapped_pools(runner: RunnerProcess) -> int:
    maps = Path(f"/proc/{runner.pid}/maps").read_text().splitlines()
    return sum("memfd:" in line for line in maps)


def test_runners_killed_at_random_points_lose_no_token(
    spawner: RunnerSpawner, runtime_dir: Path, manager: ManagerProcess
) -> None:
    rng = random.Random(11)
    with ExitStack() as stack:
        runner = stack.enter_context(spawner.started(runtime_dir))
        gateway = stack.enter_context(ResubmittingGateway(runner.socket))
        expected = gateway.wait(begin(gateway))
        for _ in range(num_cycles(4)):
            streams = begin(gateway)
            wait_for_tokens(streams, rng.randrange(1, 40))
            runner.kill()
            runner = stack.enter_context(spawner.started(runtime_dir))
            assert gateway.wait(streams) == expected
            assert max(tokens for stream in streams for tokens in stream.recomputed) <= BLOCK_SIZE
            check_nothing_is_left(manager)


def test_managers_killed_at_random_points_lose_no_token_of_two_runners(
    spawner: RunnerSpawner, runtime_dir: Path
) -> None:
    rng = random.Random(12)
    with ExitStack() as stack:
        manager = stack.enter_context(ManagerProcess(runtime_dir, *POOL))
        runners = [stack.enter_context(spawner.started(runtime_dir, name=name)) for name in ("0", "standby")]
        gateways = [stack.enter_context(ResubmittingGateway(runner.socket)) for runner in runners]
        expected = gateways[0].wait(begin(gateways[0]))
        for _ in range(num_cycles(3)):
            streams = [begin(gateway) for gateway in gateways]
            wait_for_tokens(streams[rng.randrange(2)], rng.randrange(1, 40))
            manager.process.kill()
            manager.process.wait()
            manager = stack.enter_context(ManagerProcess(runtime_dir, *POOL))
            for gateway, begun in zip(gateways, streams, strict=True):
                assert gateway.wait(begun) == expected
            check_nothing_is_left(manager)
            # Both let go of the old pool before they asked for the new one.
            assert [mapped_pools(runner) for runner in runners] == [1, 1]
        assert [len(gateway.hellos) for gateway in gateways] == [1, 1]


def test_a_stopped_runner_keeps_what_it_holds_and_woken_up_lets_go_of_it_and_serves(
    spawner: RunnerSpawner, runtime_dir: Path, manager: ManagerProcess
) -> None:
    rng = random.Random(13)
    with (
        spawner.started(runtime_dir) as runner,
        spawner.started(runtime_dir, name="1") as other,
        ResubmittingGateway(other.socket) as elsewhere,
    ):
        expected = elsewhere.wait(begin(elsewhere))
        for _ in range(num_cycles(3)):
            with ResubmittingGateway(runner.socket) as gateway:
                streams = begin(gateway, max_tokens=1900)
                wait_for_tokens(streams, rng.randrange(1, 40))
                runner.signal(signal.SIGSTOP)
                held = sequences_of(manager, runner.pid)
                assert held > 0
            assert elsewhere.wait(begin(elsewhere)) == expected
            assert sequences_of(manager, runner.pid) == held
            runner.signal(signal.SIGCONT)
            check_nothing_is_left(manager)
            with ResubmittingGateway(runner.socket) as gateway:
                assert gateway.wait(begin(gateway)) == expected
        assert len(manager.stats().sessions) == 2


def test_a_stopped_manager_makes_no_runner_unwell(
    spawner: RunnerSpawner, runtime_dir: Path, manager: ManagerProcess
) -> None:
    with (
        spawner.started(runtime_dir) as runner,
        ResubmittingGateway(runner.socket) as gateway,
        Client(unix_target(runner.socket)) as health,
    ):
        expected = gateway.wait(begin(gateway))
        live = begin(gateway, max_tokens=300)
        wait_for_tokens(live, 3)
        manager.process.send_signal(signal.SIGSTOP)
        until(lambda: runner.report().state == WAITING)
        late = gateway.submit(PROMPTS[0], 10)
        gateway.cancel(live.pop())
        assert health.health()
        assert late.num_tokens == 0
        manager.process.send_signal(signal.SIGCONT)
        assert gateway.wait(live) == expected[:-1]
        assert gateway.wait([late])[0][0] == expected[0][0][:10]
        assert len(gateway.hellos) == 1
        assert runner.exit_code() is None
        check_nothing_is_left(manager)


def test_case_38_a_runner_that_slept_through_its_managers_restart_attaches_to_the_new_one(
    spawner: RunnerSpawner, runtime_dir: Path, manager: ManagerProcess
) -> None:
    """Case 38: a restart of the owner missed between heartbeats: the runner attaches again, and loses no token."""
    with spawner.started(runtime_dir) as runner, ResubmittingGateway(runner.socket) as gateway:
        expected = gateway.wait(begin(gateway))
        streams = begin(gateway)
        wait_for_tokens(streams, 5)
        runner.signal(signal.SIGSTOP)
        before = manager.stats()
        manager.process.kill()
        manager.process.wait()
        with ManagerProcess(runtime_dir, *POOL) as successor:
            assert not successor.stats().sessions
            runner.signal(signal.SIGCONT)
            assert gateway.wait(streams) == expected
            after = successor.stats()
            assert [session.pid for session in after.sessions] == [runner.pid]
            assert after.server.started_at > before.server.started_at
            assert mapped_pools(runner) == 1
            check_nothing_is_left(successor)


def test_case_38_what_was_said_to_a_manager_means_nothing_to_its_successor(runtime_dir: Path) -> None:
    """Case 38: the epoch differs, stale operations fail."""
    with ManagerProcess(runtime_dir, *TINY_POOL) as manager, closing(connect(manager)) as client:
        client.send(1, 0, [opening(1, tokens(2))])
        client.receive(LIMIT_S)
        manager.process.kill()
        manager.process.wait()
        with ManagerProcess(runtime_dir, *TINY_POOL) as successor, closing(connect(successor)) as other:
            assert (other.granted.start_id, other.granted.epoch) != (client.granted.start_id, client.granted.epoch)
            with pytest.raises(CacheConnectionLost):
                client.receive(LIMIT_S)
            stale = [wire.hello_to_proto(client._handover.token, "r", TINY_LAYOUT, FINGERPRINT), message(2)]
            with grpc.insecure_channel(unix_target(RuntimeDir(runtime_dir).cache_socket)) as channel:
                call = cache_pb2_grpc.CacheServiceStub(channel).Attach(iter(stale))
                with pytest.raises(grpc.RpcError, match="no living runner has it"):
                    next(call)
            assert len(successor.stats().sessions) == 1


def test_case_11_a_manager_that_is_shut_down_with_live_sessions_harms_no_runner(
    spawner: RunnerSpawner, runtime_dir: Path, manager: ManagerProcess
) -> None:
    """Case 11: shutting the manager down with live sessions: it ends in good order; no crash of the runner."""
    with (
        spawner.started(runtime_dir) as runner,
        spawner.started(runtime_dir, name="1") as stopped,
        ResubmittingGateway(runner.socket) as gateway,
    ):
        expected = gateway.wait(begin(gateway))
        stopped.wait_until_ready()
        stopped.signal(signal.SIGSTOP)
        streams = begin(gateway)
        wait_for_tokens(streams, 5)
        manager.process.terminate()
        assert manager.process.wait(LIMIT_S) == 0
        assert "Traceback" not in manager._log.read_text()
        with ManagerProcess(runtime_dir, *POOL) as successor:
            assert gateway.wait(streams) == expected
            assert len(gateway.hellos) == 1
            assert runner.exit_code() is None
            assert "Traceback" not in runner.log()
            stopped.signal(signal.SIGCONT)
            until(lambda: len(successor.stats().sessions) == 2)
            check_nothing_is_left(successor)
