"""The real process: what runners, operators and strangers can do to it, and what it outlives."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from cache_manager import wire
from cache_manager.client import CacheClient, CacheConnectionLost
from cache_manager.handover import HELLO, HandoverClient
from kernels.kv_layout import KvLayout
from pagekeeper.common.errors import ConfigurationError
from pagekeeper.common.operations import BlockRef, Extend, Fork, Opened, Release, Seal, StepMessage
from pagekeeper.common.sockets import unix_target
from pagekeeper.v1 import admin_pb2, cache_pb2, cache_pb2_grpc
from tests.fakes.local_cache import FINGERPRINT, TINY_LAYOUT
from tests.fakes.manager import ManagerProcess
from tests.fakes.policy_session import opening, tokens

NUM_BLOCKS = 32
POOL = ("--pool-size", str(NUM_BLOCKS * TINY_LAYOUT.block_bytes))
LIMIT_S = 20.0
ROOT = Path(__file__).parents[2]


@pytest.fixture
def manager(runtime_dir: Path) -> Iterator[ManagerProcess]:
    with ManagerProcess(runtime_dir, *POOL) as process:
        yield process
        if process.process.poll() is None:
            assert list(process.audit().violations) == []


def _connect(manager: ManagerProcess, runner_id: str = "runner", layout: KvLayout = TINY_LAYOUT) -> CacheClient:
    return CacheClient.connect(manager.runtime_dir, runner_id, layout, FINGERPRINT, LIMIT_S)


@contextmanager
def _child(manager: ManagerProcess, *, base: int, num_blocks: int, num_sealed: int) -> Iterator[subprocess.Popen[str]]:
    """A runner in a process of its own, once it has said that it is ready."""
    arguments = [str(manager.runtime_dir.path), str(base), str(num_blocks), str(num_sealed)]
    command = [sys.executable, "-m", "tests.fakes.cache_runner", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def _start(runtime_dir: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """A manager that is expected to end by itself."""
    command = [sys.executable, "-m", "cache_manager", "--runtime-dir", str(runtime_dir), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


# The ends of runners


def test_a_killed_runners_leases_are_freed(manager: ManagerProcess) -> None:
    with _child(manager, base=0, num_blocks=5, num_sealed=2) as child:
        pool = manager.stats().pool
        assert (pool.leased_blocks, pool.sealed_blocks) == (3, 2)
        assert manager.stats().sessions[0].pid == child.pid
        child.kill()
        _wait_until(lambda: not manager.stats().sessions)
        pool = manager.stats().pool
        assert (pool.leased_blocks, pool.sealed_blocks, pool.cached_blocks) == (0, 0, 2)
        assert pool.free_blocks == pool.total_blocks - 1


def test_case_09_a_block_whose_writer_was_killed_before_the_seal_is_never_a_hit(manager: ManagerProcess) -> None:
    """Case 9: killed between write and seal."""
    with _child(manager, base=0, num_blocks=4, num_sealed=2) as child:
        child.kill()
        _wait_until(lambda: not manager.stats().sessions)
    with closing(_connect(manager)) as heir:
        heir.send(1, 0, [opening(1, tokens(4))])
        (opened,) = heir.receive(LIMIT_S)
        assert opened.num_cached_tokens == 16
        for index, block in enumerate(opened.blocks[:2]):
            start = block.id * TINY_LAYOUT.block_bytes
            content = heir.memory[start : start + TINY_LAYOUT.block_bytes]
            assert content == bytes([index + 1]) * TINY_LAYOUT.block_bytes
        heir.send(2, 2, [Release(1)])
        heir.send(3, 3, [])
        heir.receive(LIMIT_S)
        heir.receive(LIMIT_S)


def test_a_stopped_runner_keeps_what_it_holds(manager: ManagerProcess) -> None:
    with _child(manager, base=0, num_blocks=5, num_sealed=2) as child, closing(_connect(manager)) as other:
        child.send_signal(signal.SIGSTOP)
        for step in range(1, 100):
            other.send(step, step - 1, [opening(step, tokens(1, base=50)), Release(step)])
            other.receive(LIMIT_S)
        assert manager.stats().usage.physical_blocks == 5


def test_a_broken_stream_takes_nothing_away(manager: ManagerProcess) -> None:
    handover = HandoverClient(manager.runtime_dir.handover_socket, LIMIT_S)
    hello = wire.hello_to_proto(handover.token, "runner", TINY_LAYOUT, FINGERPRINT)
    with grpc.insecure_channel(unix_target(manager.runtime_dir.cache_socket)) as channel:
        call = cache_pb2_grpc.CacheServiceStub(channel).Attach(iter([hello, _message(1, opening(1, tokens(2)))]))
        assert next(call).HasField("granted")
        assert next(call).HasField("results")
        call.cancel()
    assert manager.stats().pool.leased_blocks == 2
    handover.close()
    _close_all(handover.descriptors)
    _wait_until(lambda: manager.stats().pool.leased_blocks == 0)


def test_a_superseded_stream_is_refused_and_the_new_one_goes_on(manager: ManagerProcess) -> None:
    client = _connect(manager)
    old = client._stream
    old_call = old._call
    client._stream = type(old)(client._target, client._hello, LIMIT_S)
    old.send(1, 0, [opening(1, tokens(2))])
    with pytest.raises(CacheConnectionLost, match="FAILED_PRECONDITION: session 1 has ended"):
        old.receive(LIMIT_S)
    assert old_call.code() is grpc.StatusCode.FAILED_PRECONDITION
    client.send(1, 0, [opening(1, tokens(2))])
    assert isinstance(client.receive(LIMIT_S)[0], Opened)
    old.close()
    client.close()


# The ends of managers


def test_a_killed_manager_is_noticed_and_its_successor_serves_the_same_directory(manager: ManagerProcess) -> None:
    client = _connect(manager)
    client.send(1, 0, [opening(1, tokens(2))])
    client.receive(LIMIT_S)
    manager.process.kill()
    manager.process.wait()
    with pytest.raises(CacheConnectionLost):
        client.receive(LIMIT_S)
    with pytest.raises(CacheConnectionLost):
        client.reattach(LIMIT_S)
    client.memory[:4] = b"mine"  # the mapping outlives the manager
    assert manager.runtime_dir.handover_socket.exists()
    with ManagerProcess(manager.runtime_dir.path, *POOL) as successor, closing(_connect(successor)) as heir:
        assert heir.granted.start_id != client.granted.start_id
        assert heir.memory[:4] == bytes(4)
        heir.send(1, 0, [opening(1, tokens(2))])
        assert heir.receive(LIMIT_S)[0].num_cached_tokens == 0
    client.close()


def test_told_to_stop_it_says_so_and_leaves_the_runner_its_memory(manager: ManagerProcess) -> None:
    client = _connect(manager)
    client.send(1, 0, [opening(1, tokens(2))])
    (opened,) = client.receive(LIMIT_S)
    with grpc.insecure_channel(manager.admin_listen) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=LIMIT_S)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        manager.process.terminate()
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
    assert manager.process.wait(timeout=LIMIT_S) == 0
    with pytest.raises(CacheConnectionLost):
        client.receive(LIMIT_S)
    start = opened.blocks[1].id * TINY_LAYOUT.block_bytes
    client.memory[start : start + 5] = b"still"
    assert client.memory[start : start + 5] == b"still"
    client.close()
    assert not manager.runtime_dir.handover_socket.exists()
    assert manager.log_lines()[-1]["event"] == "stopping"


def test_no_manager_is_an_error_after_the_time_allowed(runtime_dir: Path, manager: ManagerProcess) -> None:
    manager.process.terminate()
    manager.process.wait()
    with pytest.raises(CacheConnectionLost, match=f"^no cache manager serves {runtime_dir}: "):
        CacheClient.connect(manager.runtime_dir, "runner", TINY_LAYOUT, FINGERPRINT, 0.2)


# Wrong starts


def test_a_second_manager_in_the_same_directory_is_refused(manager: ManagerProcess) -> None:
    second = _start(manager.runtime_dir.path, *POOL, "--admin-listen", "127.0.0.1:0")
    assert second.returncode == 2
    assert second.stderr == f"runtime_dir: another cache manager serves {manager.runtime_dir.path}\n"
    with closing(_connect(manager)) as client:
        client.send(1, 0, [])
        assert client.receive(LIMIT_S) == []


def test_a_busy_port_is_one_line(runtime_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = _start(runtime_dir, *POOL, "--admin-listen", address)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == f"admin_listen: cannot listen on {address}; is it in use?"
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(("flag", "value"), [("--pool-size", "lots"), ("--pool-size", "1EiB"), ("--watermark", "2")])
def test_a_wrong_setting_is_one_line(runtime_dir: Path, flag: str, value: str) -> None:
    ended = _start(runtime_dir, "--admin-listen", "127.0.0.1:0", flag, value)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"{flag[2:].replace('-', '_')}: ")
    assert len(ended.stderr.splitlines()) == 1


def test_a_directory_that_is_open_to_others_is_refused(runtime_dir: Path) -> None:
    runtime_dir.chmod(0o750)
    ended = _start(runtime_dir, *POOL)
    assert ended.returncode == 2
    assert ended.stderr == f"runtime_dir: {runtime_dir} must be a directory of this user with mode 0700\n"


# Wrong runners and strangers


def _message(number: int, *operations: object) -> cache_pb2.AttachRequest:
    return wire.message_to_proto(StepMessage(number, 0, 0, list(operations)))


def _code_of(manager: ManagerProcess, *requests: cache_pb2.AttachRequest) -> tuple[grpc.StatusCode, str]:
    """How the manager ends a stream that brings these messages."""
    with grpc.insecure_channel(unix_target(manager.runtime_dir.cache_socket)) as channel:
        call = cache_pb2_grpc.CacheServiceStub(channel).Attach(iter(requests), timeout=LIMIT_S)
        with pytest.raises(grpc.RpcError) as caught:
            for _ in call:
                pass
        return caught.value.code(), caught.value.details()


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.fixture
def token(manager: ManagerProcess) -> Iterator[bytes]:
    """A good session token."""
    handover = HandoverClient(manager.runtime_dir.handover_socket, LIMIT_S)
    yield handover.token
    handover.close()
    _close_all(handover.descriptors)


def test_a_token_of_no_living_runner_is_unauthenticated(manager: ManagerProcess) -> None:
    for token in (b"", bytes(32), b"x" * 5000):
        code, details = _code_of(manager, wire.hello_to_proto(token, "runner", TINY_LAYOUT, FINGERPRINT))
        assert code is grpc.StatusCode.UNAUTHENTICATED
        assert details == "session_token: no living runner has it"


def test_a_runner_with_another_model_or_layout_is_told_which_field_differs(manager: ManagerProcess) -> None:
    with closing(_connect(manager)):
        with pytest.raises(ConfigurationError, match=r"^block_size: the pool holds blocks for 8, this runner has 16"):
            _connect(manager, layout=replace(TINY_LAYOUT, block_size=16))
        other = replace(FINGERPRINT, weights="finetuned")
        with pytest.raises(ConfigurationError, match=r"^weights: "):
            CacheClient.connect(manager.runtime_dir, "runner", TINY_LAYOUT, other, LIMIT_S)
    _wait_until(lambda: not manager.stats().sessions)


def test_a_pool_too_small_for_the_model_is_an_error_of_the_runner(manager: ManagerProcess) -> None:
    with pytest.raises(ConfigurationError, match=r"^pool_size: 16384 bytes are too small"):
        _connect(manager, layout=replace(TINY_LAYOUT, num_layers=1000))


def test_another_layout_carves_an_unused_pool_anew_and_that_is_logged(manager: ManagerProcess) -> None:
    with _child(manager, base=0, num_blocks=3, num_sealed=3) as child:
        child.kill()
        _wait_until(lambda: not manager.stats().sessions)
    with closing(_connect(manager, layout=replace(TINY_LAYOUT, block_size=16))) as client:
        assert client.granted.num_blocks == NUM_BLOCKS // 2
    assert [line["cached_blocks"] for line in manager.log_lines() if "anew" in line["event"]] == [3]


@pytest.mark.parametrize(
    "requests",
    [
        [],
        [cache_pb2.AttachRequest()],
        [cache_pb2.AttachRequest(operations=cache_pb2.StepOperations(number=1))],
    ],
    ids=["nothing", "empty", "operations first"],
)
def test_a_stream_without_a_hello_is_invalid(manager: ManagerProcess, requests: list[cache_pb2.AttachRequest]) -> None:
    assert _code_of(manager, *requests)[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_messages_that_make_no_sense_end_their_stream_alone(manager: ManagerProcess, token: bytes) -> None:
    hello = wire.hello_to_proto(token, "runner", TINY_LAYOUT, FINGERPRINT)
    empty_operation = cache_pb2.StepOperations(number=1, operations=[cache_pb2.Operation()])
    with closing(_connect(manager)) as neighbour:
        for wrong in (hello, cache_pb2.AttachRequest(), cache_pb2.AttachRequest(operations=empty_operation)):
            assert _code_of(manager, hello, wrong)[0] is grpc.StatusCode.INVALID_ARGUMENT
        assert _code_of(manager, hello, _message(2))[0] is grpc.StatusCode.FAILED_PRECONDITION
        hello.hello.layout.block_size = 9
        code, details = _code_of(manager, hello)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details.startswith("hello.layout: block_size")
        neighbour.send(1, 0, [opening(1, tokens(2))])
        assert isinstance(neighbour.receive(LIMIT_S)[0], Opened)


def test_it_survives_any_bytes_on_any_socket(manager: ManagerProcess) -> None:
    garbage = [b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", os.urandom(100_000), HELLO, HELLO * 3, HELLO[:5]]
    addresses = [manager.runtime_dir.cache_socket, manager.runtime_dir.handover_socket]
    for data in garbage:
        for address in addresses:
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(str(address))
                with suppress(BrokenPipeError, ConnectionResetError):  # it may hang up before everything is said
                    stranger.sendall(data)
                    stranger.shutdown(socket.SHUT_WR)
    with grpc.insecure_channel(unix_target(manager.runtime_dir.cache_socket)) as channel:
        raw = channel.stream_stream("/pagekeeper.v1.CacheService/Attach")
        with pytest.raises(grpc.RpcError):
            list(raw(iter([os.urandom(1000)]), timeout=LIMIT_S))
    with closing(_connect(manager)) as client:
        client.send(1, 0, [])
        assert client.receive(LIMIT_S) == []


# What operators see


def test_the_admin_port_answers_without_a_runner(manager: ManagerProcess) -> None:
    stats = manager.stats()
    assert (stats.pool.total_blocks, stats.pool.backend) == (0, "memfd")
    assert stats.server.version
    assert time.time() - stats.server.started_at < 600
    audit = manager.audit()
    assert (audit.clean, audit.checked_blocks) == (True, 0)


def test_statistics_travel_whole(manager: ManagerProcess) -> None:
    with closing(_connect(manager, "runner-a")) as client:
        client.send(1, 0, [opening(1, tokens(2.5))])
        client.send(2, 1, [Seal(1, tokens(2), [BlockRef(1, 1), BlockRef(2, 1)]), Fork(1, 20, [2]), Extend(1, 21)])
        client.receive(LIMIT_S)
        client.receive(LIMIT_S)
        stats = manager.stats()
        assert (stats.pool.block_size, stats.pool.block_bytes, stats.pool.total_blocks) == (8, 512, NUM_BLOCKS)
        assert (stats.usage.logical_tokens, stats.usage.resident_tokens) == (41, 16 + 5 + 4)
        assert (stats.usage.logical_blocks, stats.usage.physical_blocks) == (6, 4)
        assert stats.usage.utilization == pytest.approx(25 / 32)
        assert stats.usage.sharing_saved == pytest.approx(1 / 3)
        assert (stats.ops.seals, stats.ops.forks, stats.ops.copy_on_write) == (2, 1, 1)
        assert (stats.prefix.lookups, stats.prefix.queried_tokens) == (1, 20)
        (session,) = stats.sessions
        assert (session.epoch, session.runner_id, session.state, session.pid) == (
            1,
            "runner-a",
            "attached",
            os.getpid(),
        )
        assert manager.audit().checked_blocks == NUM_BLOCKS - 1


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_is_served_under_both_names(manager: ManagerProcess, version: str) -> None:
    with grpc.insecure_channel(manager.admin_listen) as channel:
        method = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        (answer,) = method(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=LIMIT_S)
    names = {service.name for service in answer.list_services_response.service}
    assert {"pagekeeper.v1.AdminService", "grpc.health.v1.Health", "grpc.channelz.v1.Channelz"} <= names


def test_channelz_and_health_are_served(manager: ManagerProcess) -> None:
    with grpc.insecure_channel(manager.admin_listen) as channel:
        servers = channelz_pb2_grpc.ChannelzStub(channel).GetServers(
            channelz_pb2.GetServersRequest(start_server_id=0), timeout=LIMIT_S
        )
        assert len(servers.server) == 2
        for service in ("", "pagekeeper.v1.AdminService"):
            request = health_pb2.HealthCheckRequest(service=service)
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=LIMIT_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_the_cache_socket_serves_no_admin(manager: ManagerProcess) -> None:
    with grpc.insecure_channel(unix_target(manager.runtime_dir.cache_socket)) as channel:
        call = channel.unary_unary(
            "/pagekeeper.v1.AdminService/GetStats",
            request_serializer=admin_pb2.GetStatsRequest.SerializeToString,
            response_deserializer=admin_pb2.GetStatsResponse.FromString,
        )
        with pytest.raises(grpc.RpcError) as caught:
            call(admin_pb2.GetStatsRequest(), timeout=LIMIT_S)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
