"""What the service tells a caller of errors, in process and with a real stream."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from cache_manager import service, wire
from cache_manager.admin import AdminService
from cache_manager.event_feed import EventFeed
from cache_manager.memory.memfd import MemfdPool
from cache_manager.quarantine import Quarantine
from cache_manager.service import CacheService
from cache_manager.shared_pool import SharedPool
from pagekeeper.common.operations import StepMessage
from pagekeeper.common.sockets import unix_target
from pagekeeper.v1 import admin_pb2, admin_pb2_grpc, cache_pb2, cache_pb2_grpc
from tests.fakes.local_cache import FINGERPRINT, TINY_LAYOUT
from tests.fakes.policy_session import tiny_policy

LIMIT_S = 10.0
INTERNALS = "the text of an exception"


class BrokenPolicy:
    """Raises what nobody expects, wherever it is asked."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(INTERNALS)


class Connection:
    """A runner that has shaken hands."""

    token = b"token"
    pid = 1


@pytest.fixture
async def channel(runtime_dir: Path, request: pytest.FixtureRequest) -> AsyncIterator[grpc.aio.Channel]:
    """To a server whose policy is broken, if a parameter says so."""
    policy = BrokenPolicy() if getattr(request, "param", None) == "broken" else tiny_policy(8)
    memory = MemfdPool(1 << 16, preallocate=False)
    carrier = CacheService(policy, SharedPool(memory), "start", Quarantine(lambda _: None, 0.0))
    carrier.runner_connected(Connection())
    server = grpc.aio.server()
    cache_pb2_grpc.add_CacheServiceServicer_to_server(carrier, server)
    admin = AdminService(policy, EventFeed(policy), lambda: "memfd", "start", 0.0, "0")
    admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
    target = unix_target(runtime_dir / "cache.sock")
    server.add_insecure_port(target)
    await server.start()
    async with grpc.aio.insecure_channel(target) as opened:
        yield opened
    await server.stop(None)
    memory.close()


async def _end_of(call: grpc.aio.StreamStreamCall) -> tuple[grpc.StatusCode, str]:
    async with asyncio.timeout(LIMIT_S):
        while await call.read() is not grpc.aio.EOF:
            pass
        return await call.code(), await call.details()


async def test_who_opens_a_stream_and_says_nothing_is_hung_up_on(
    channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_HELLO_SECONDS", 0.02)
    call = cache_pb2_grpc.CacheServiceStub(channel).Attach()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _end_of(call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("channel", ["broken"], indirect=True)
async def test_an_unexpected_error_reaches_nobody_as_text(channel: grpc.aio.Channel) -> None:
    hello = wire.hello_to_proto(b"token", "runner", TINY_LAYOUT, FINGERPRINT)
    call = cache_pb2_grpc.CacheServiceStub(channel).Attach(iter([hello]))
    admin = admin_pb2_grpc.AdminServiceStub(channel)
    calls = [
        _end_of(call),
        admin.GetStats(admin_pb2.GetStatsRequest(), timeout=LIMIT_S),
        admin.Audit(admin_pb2.AuditRequest(), timeout=LIMIT_S),
    ]
    for failing in calls:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await failing
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert caught.value.details().startswith("internal error ")
        assert INTERNALS not in caught.value.details()


async def test_answers_carry_the_number_of_their_message(channel: grpc.aio.Channel) -> None:
    call = cache_pb2_grpc.CacheServiceStub(channel).Attach()
    await call.write(wire.hello_to_proto(b"token", "runner", TINY_LAYOUT, FINGERPRINT))
    for number in (1, 2):
        await call.write(wire.message_to_proto(StepMessage(number, number, 0, [])))
    async with asyncio.timeout(LIMIT_S):
        answers = [await call.read() for _ in range(3)]
    call.cancel()
    granted = answers[0].granted
    assert (granted.num_blocks, granted.watermark_blocks, granted.memory.memfd.size) == (8, 1, 1 << 16)
    assert [answer.results.number for answer in answers[1:]] == [1, 2]
    assert isinstance(answers[1], cache_pb2.AttachResponse)
