"""The real process: what wrong runners, strangers and operators get from it."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from cache_manager import wire
from cache_manager.client import CacheClient
from cache_manager.handover import HELLO, HandoverClient
from pagekeeper.client import AdminClient
from pagekeeper.common.errors import CannotConnectError, ConfigurationError, InvalidRequestError
from pagekeeper.common.operations import BlockRef, Extend, Fork, Opened, Release, Seal
from pagekeeper.common.sockets import unix_target
from pagekeeper.v1 import admin_pb2, cache_pb2, cache_pb2_grpc
from tests.fakes.local_cache import FINGERPRINT, TINY_LAYOUT
from tests.fakes.manager import LIMIT_S, NUM_BLOCKS, POOL, ManagerProcess, connect, message, runner_process, wait_until
from tests.fakes.policy_session import opening, tokens


@pytest.fixture
def manager(runtime_dir: Path) -> Iterator[ManagerProcess]:
    with ManagerProcess(runtime_dir, *POOL) as process:
        yield process
        if process.process.poll() is None:
            assert list(process.audit().violations) == []


# Wrong runners and strangers


def _code_of(manager: ManagerProcess, *requests: cache_pb2.AttachRequest) -> tuple[grpc.StatusCode, str]:
    """How the manager ends a stream that brings these messages."""
    with grpc.insecure_channel(unix_target(manager.runtime_dir.cache_socket)) as channel:
        call = cache_pb2_grpc.CacheServiceStub(channel).Attach(iter(requests), timeout=LIMIT_S)
        with pytest.raises(grpc.RpcError) as caught:
            for _ in call:
                pass
        return caught.value.code(), caught.value.details()


@pytest.fixture
def token(manager: ManagerProcess) -> Iterator[bytes]:
    """A good session token."""
    handover = HandoverClient(manager.runtime_dir.handover_socket, LIMIT_S)
    yield handover.token
    handover.close()
    os.close(handover.descriptors[0])


def test_a_token_of_no_living_runner_is_unauthenticated(manager: ManagerProcess) -> None:
    for token in (b"", bytes(32), b"x" * 5000):
        code, details = _code_of(manager, wire.hello_to_proto(token, "runner", TINY_LAYOUT, FINGERPRINT))
        assert code is grpc.StatusCode.UNAUTHENTICATED
        assert details == "session_token: no living runner has it"


def test_a_runner_with_another_model_or_layout_is_told_which_field_differs(manager: ManagerProcess) -> None:
    with closing(connect(manager)):
        with pytest.raises(ConfigurationError, match=r"^block_size: the pool holds blocks for 8, this runner has 16"):
            connect(manager, layout=replace(TINY_LAYOUT, block_size=16))
        other = replace(FINGERPRINT, weights="finetuned")
        with pytest.raises(ConfigurationError, match=r"^weights: "):
            CacheClient.connect(manager.runtime_dir, "runner", TINY_LAYOUT, other, LIMIT_S)
    wait_until(lambda: not manager.stats().sessions)


def test_a_pool_too_small_for_the_model_is_an_error_of_the_runner(manager: ManagerProcess) -> None:
    with pytest.raises(ConfigurationError, match=r"^pool_size: 16384 bytes are too small"):
        connect(manager, layout=replace(TINY_LAYOUT, num_layers=1000))


def test_another_layout_carves_an_unused_pool_anew_and_that_is_logged(manager: ManagerProcess) -> None:
    with runner_process(manager, base=0, num_blocks=3, num_sealed=3) as child:
        child.kill()
        wait_until(lambda: not manager.stats().sessions)
    with closing(connect(manager, layout=replace(TINY_LAYOUT, block_size=16))) as client:
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
    with closing(connect(manager)) as neighbour:
        for wrong in (hello, cache_pb2.AttachRequest(), cache_pb2.AttachRequest(operations=empty_operation)):
            assert _code_of(manager, hello, wrong)[0] is grpc.StatusCode.INVALID_ARGUMENT
        assert _code_of(manager, hello, message(2))[0] is grpc.StatusCode.FAILED_PRECONDITION
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
    with closing(connect(manager)) as client:
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
    with closing(connect(manager, "runner-a")) as client:
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


def test_the_client_lists_flushes_and_watches(manager: ManagerProcess) -> None:
    with closing(connect(manager, "runner-a")) as runner, AdminClient(manager.admin_listen) as admin:
        runner.send(1, 0, [opening(1, tokens(2.5)), opening(2, tokens(1, base=50))])
        first, second = runner.receive(LIMIT_S)
        seals = [Seal(1, tokens(2), first.blocks[:2]), Seal(2, tokens(1, base=50), second.blocks)]
        runner.send(2, 1, [*seals, Release(2)])
        runner.send(3, 3, [])
        runner.receive(LIMIT_S)
        runner.receive(LIMIT_S)
        watched = admin.watch_stats(interval_s=0.1)
        assert next(watched)["pool"] == admin.stats()["pool"]
        assert [session["sequences"] for session in admin.sessions()] == [1]
        (sequence,) = admin.sequences(with_block_tables=True)
        assert sequence["block_table"] == [ref.id for ref in first.blocks]
        states = [block["state"] for block in admin.blocks()]
        assert len(states) == NUM_BLOCKS - 1
        assert [states.count(word) for word in ("sealed", "leased", "free", "quarantined")] == [2, 1, NUM_BLOCKS - 4, 0]
        assert admin.flush() == 1
        while next(watched)["pool"]["cached_blocks"]:
            pass
        watched.close()
        with pytest.raises(InvalidRequestError, match="interval_seconds: must be from"):
            next(admin.watch_stats(interval_s=0.01))


def test_a_watcher_learns_that_the_manager_stops(manager: ManagerProcess) -> None:
    with AdminClient(manager.admin_listen) as admin:
        watched = admin.watch_stats(interval_s=0.1)
        next(watched)
        manager.process.terminate()
        with pytest.raises(CannotConnectError):
            for _ in watched:
                pass
    assert manager.process.wait(LIMIT_S) == 0


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
