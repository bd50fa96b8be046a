"""What operators are answered, over a real connection, while runners' messages are applied."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status.rpc_status import aio

from cache_manager import admin, state
from cache_manager.admin import AdminService
from cache_manager.event_feed import EventFeed
from pagekeeper.common.operations import Extend, Fork, Release, Seal
from pagekeeper.common.sockets import unix_target
from pagekeeper.v1 import admin_pb2, admin_pb2_grpc
from tests.fakes.policy_session import PolicySession, opening, tiny_policy, tokens

LIMIT_S = 10.0
BUFFER_EVENTS = 64


class Manager:
    """An admin service over a policy that the test drives, and a stub of it."""

    def __init__(self, runtime_dir: Path) -> None:
        self.session = PolicySession(tiny_policy(64))
        self.policy = self.session.policy
        feed = EventFeed(self.policy, BUFFER_EVENTS)
        self.service = AdminService(self.policy, feed, lambda: "memfd", "start", started_at=1.5, version="0")
        self.target = unix_target(runtime_dir / "admin.sock")
        self.names = iter(range(1, 10_000))

    @property
    def num_watchers(self) -> int:
        return self.service._num_watchers

    def store(self, num_blocks: int, token_ids: list[int] | None = None) -> None:
        """Seal so many new blocks and let them go."""
        name = next(self.names)
        token_ids = token_ids or tokens(num_blocks, base=1000 * name)
        opened = self.session.do(opening(name, token_ids))
        self.session.do(Seal(name, token_ids, opened.blocks))
        self.session.do(Release(name))
        self.session.idle()


@pytest.fixture
def manager(runtime_dir: Path) -> Manager:
    return Manager(runtime_dir)


@pytest.fixture
async def stub(manager: Manager) -> AsyncIterator[admin_pb2_grpc.AdminServiceStub]:
    server = grpc.aio.server()
    admin_pb2_grpc.add_AdminServiceServicer_to_server(manager.service, server)
    server.add_insecure_port(manager.target)
    await server.start()
    async with grpc.aio.insecure_channel(manager.target) as channel:
        yield admin_pb2_grpc.AdminServiceStub(channel)
    await server.stop(None)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.005)


async def _drain(call: grpc.aio.UnaryStreamCall) -> None:
    async with asyncio.timeout(LIMIT_S):
        while await call.read() is not grpc.aio.EOF:
            pass
        assert await call.code() is not grpc.StatusCode.OK


async def _failure(call: grpc.aio.UnaryStreamCall) -> tuple[grpc.StatusCode, object]:
    """Code and details of a call that fails; details as BadRequest or ErrorInfo."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _drain(call)
    (first, *_) = (await aio.from_call(call)).details
    for kind in (error_details_pb2.BadRequest, error_details_pb2.ErrorInfo):
        found = kind()
        if first.Unpack(found):
            return caught.value.code(), found
    raise AssertionError(first)


# Statistics


async def test_statistics_come_at_once_and_after_each_interval(
    manager: Manager, stub: admin_pb2_grpc.AdminServiceStub
) -> None:
    call = stub.WatchStats(admin_pb2.WatchStatsRequest(interval_seconds=0.1), timeout=LIMIT_S)
    before = await call.read()
    assert before.stats == await stub.GetStats(admin_pb2.GetStatsRequest())
    manager.store(3)
    async with asyncio.timeout(LIMIT_S):
        while (await call.read()).stats.pool.cached_blocks != 3:
            pass
    call.cancel()
    await _until(lambda: manager.num_watchers == 0)


@pytest.mark.parametrize("interval", [0.0, -1.0, 0.05, 4000.0, float("nan"), float("inf")])
async def test_an_interval_out_of_bounds_is_named(stub: admin_pb2_grpc.AdminServiceStub, interval: float) -> None:
    code, details = await _failure(stub.WatchStats(admin_pb2.WatchStatsRequest(interval_seconds=interval)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    (violation,) = details.field_violations
    assert (violation.field, violation.description) == ("interval_seconds", "must be from 0.1 to 3600")


# Listings


async def test_sessions_are_listed_with_what_they_have(manager: Manager, stub: admin_pb2_grpc.AdminServiceStub) -> None:
    session = manager.session
    session.send(opening(1, tokens(2)), opening(2, tokens(3, base=100)), opening(3, tokens(60, base=500)))
    session.send(Release(2))
    other = PolicySession(manager.policy)
    first, second = (await stub.ListSessions(admin_pb2.ListSessionsRequest())).sessions
    assert (first.session.epoch, first.session.runner_id, first.session.state) == (1, "runner", "attached")
    assert (first.sequences, first.waiting_opens, first.held_blocks) == (1, 1, 3)
    assert (first.number, first.step, first.completed_step) == (2, 2, 1)
    assert second.session.epoch == other.epoch


async def _sequences(stub: admin_pb2_grpc.AdminServiceStub, **request: object) -> list[admin_pb2.SequenceInfo]:
    return [
        sequence
        async for response in stub.ListSequences(admin_pb2.ListSequencesRequest(**request), timeout=LIMIT_S)
        for sequence in response.sequences
    ]


async def test_sequences_are_listed_with_their_block_tables(
    manager: Manager, stub: admin_pb2_grpc.AdminServiceStub
) -> None:
    opened = manager.session.do(opening(1, tokens(2.5)))
    manager.session.do(Seal(1, tokens(2), opened.blocks[:2]))
    manager.session.send(Fork(1, 20, [2]), Extend(2, 21))
    PolicySession(manager.policy).do(opening(1, tokens(1, base=50), tenant="other"))
    parent, child, other = await _sequences(stub, with_block_tables=True)
    assert (parent.epoch, parent.sequence, parent.tenant) == (1, 1, "tenant")
    assert (parent.num_tokens, parent.num_blocks, parent.num_sealed_blocks) == (20, 3, 2)
    assert list(parent.block_table) == [ref.id for ref in opened.blocks]
    assert child.block_table[:2] == parent.block_table[:2]
    assert child.block_table[2] != parent.block_table[2]
    assert (other.epoch, other.tenant) == (2, "other")
    assert [sequence.epoch for sequence in await _sequences(stub, epoch=2)] == [2]
    assert not any(sequence.block_table for sequence in await _sequences(stub))
    assert await _sequences(stub, epoch=9) == []


async def test_sequences_that_end_between_two_slices_are_left_out(manager: Manager) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(state, "SLICE_BLOCKS", 4)
        for name in range(1, 7):
            manager.session.do(opening(name, tokens(1, base=100 * name)))
        slices = manager.policy.sequences()
        assert [name for _, name, _ in next(slices)] == [1, 2]
        manager.session.send(Release(3), Release(5))
        assert [name for rows in slices for _, name, _ in rows] == [4, 6]


async def _blocks(stub: admin_pb2_grpc.AdminServiceStub, *states: int) -> list[admin_pb2.BlockInfo]:
    return [
        block
        async for response in stub.ListBlocks(admin_pb2.ListBlocksRequest(states=states), timeout=LIMIT_S)
        for block in response.blocks
    ]


async def test_blocks_are_listed_and_filtered_by_state(
    manager: Manager, stub: admin_pb2_grpc.AdminServiceStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "SLICE_BLOCKS", 10)
    manager.store(2)
    opened = manager.session.do(opening(100, tokens(1.5)))
    manager.session.do(Seal(100, tokens(1), opened.blocks[:1]))
    manager.session.do(Fork(100, 12, [101, 102]))
    everything = await _blocks(stub)
    assert [block.id for block in everything] == list(range(1, 64))
    (sealed,) = await _blocks(stub, admin_pb2.BLOCK_STATE_SEALED)
    assert (sealed.id, sealed.generation, sealed.references, sealed.depth) == (opened.blocks[0].id, 1, 3, 0)
    assert len(sealed.block_hash) == 32
    (leased,) = await _blocks(stub, admin_pb2.BLOCK_STATE_LEASED)
    assert (leased.depth, leased.holds, leased.block_hash) == (1, 0, b"")
    free = await _blocks(stub, admin_pb2.BLOCK_STATE_FREE)
    assert len(free) == 61
    assert sum(bool(block.block_hash) for block in free) == 2
    assert len(await _blocks(stub, admin_pb2.BLOCK_STATE_SEALED, admin_pb2.BLOCK_STATE_LEASED)) == 2
    assert await _blocks(stub, admin_pb2.BLOCK_STATE_QUARANTINED) == []


async def test_an_unknown_state_is_named(stub: admin_pb2_grpc.AdminServiceStub) -> None:
    code, details = await _failure(stub.ListBlocks(admin_pb2.ListBlocksRequest(states=[1, 77])))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.field_violations[0].description == "77 is no state of a block"


# Flush


async def test_a_flush_drops_what_is_cached_and_keeps_what_is_in_use(
    manager: Manager, stub: admin_pb2_grpc.AdminServiceStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cache_manager.sessions.SLICE_BLOCKS", 3)
    manager.store(8, tokens(8))
    manager.session.do(opening(100, tokens(2)))
    assert (await stub.Flush(admin_pb2.FlushRequest(), timeout=LIMIT_S)).flushed_blocks == 6
    assert manager.policy.stats().pool.cached_blocks == 0
    assert manager.policy.stats().pool.sealed_blocks == 2
    assert manager.session.do(opening(101, tokens(8))).num_cached_tokens == 16
    assert (await stub.Flush(admin_pb2.FlushRequest(), timeout=LIMIT_S)).flushed_blocks == 0


# Events


async def test_events_are_numbered_from_where_the_watch_began(
    manager: Manager, stub: admin_pb2_grpc.AdminServiceStub
) -> None:
    manager.store(2)
    call = stub.WatchEvents(admin_pb2.WatchEventsRequest(), timeout=LIMIT_S)
    first = await call.read()
    assert (first.start_id, first.last_number, len(first.events)) == ("start", 2, 0)
    manager.store(1, tokens(1, base=70))
    stored = await call.read()
    assert stored.last_number == 3
    (event,) = stored.events
    assert (event.number, event.stored.block_size, event.stored.tenant) == (3, 8, "tenant")
    assert list(event.stored.token_ids) == tokens(1, base=70)
    assert (len(event.stored.block_hash), event.stored.parent_hash) == (32, b"")
    await stub.Flush(admin_pb2.FlushRequest())
    (event,) = (await call.read()).events
    assert event.number == 4
    assert stored.events[0].stored.block_hash in event.removed.block_hashes
    assert len(event.removed.block_hashes) == 3
    call.cancel()
    await _until(lambda: manager.policy._pool.listener is None)


async def test_a_watcher_too_slow_is_ended_and_holds_nobody_up(
    manager: Manager, stub: admin_pb2_grpc.AdminServiceStub
) -> None:
    slow = stub.WatchEvents(admin_pb2.WatchEventsRequest(), timeout=LIMIT_S)
    assert (await slow.read()).last_number == 0
    for _ in range(8):  # no await in between, as if the connection took nothing
        manager.store(BUFFER_EVENTS // 4)
    quick = stub.WatchEvents(admin_pb2.WatchEventsRequest(), timeout=LIMIT_S)
    await quick.read()
    code, info = await _failure(slow)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert info.reason == "SLOW_READER"
    manager.store(1)
    assert len((await quick.read()).events) > 0
    quick.cancel()


async def test_a_watcher_who_never_reads_costs_a_full_buffer_and_no_more(
    manager: Manager, stub: admin_pb2_grpc.AdminServiceStub
) -> None:
    call = stub.WatchEvents(admin_pb2.WatchEventsRequest())
    await _until(lambda: manager.num_watchers == 1)
    (watcher,) = manager.service._feed._watchers
    for _ in range(200):
        manager.store(16)
        assert len(watcher._events) <= BUFFER_EVENTS
        await asyncio.sleep(0)
    call.cancel()
    await _until(lambda: manager.num_watchers == 0 and not manager.service._feed._watchers)


async def test_there_are_only_so_many_watchers(
    manager: Manager, stub: admin_pb2_grpc.AdminServiceStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "_MAX_WATCHERS", 2)
    events = stub.WatchEvents(admin_pb2.WatchEventsRequest())
    stats = stub.WatchStats(admin_pb2.WatchStatsRequest())
    await _until(lambda: manager.num_watchers == 2)
    for refused in (stub.WatchEvents(admin_pb2.WatchEventsRequest()), stub.WatchStats(admin_pb2.WatchStatsRequest())):
        code, info = await _failure(refused)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert info.reason == "OVERLOADED"
    events.cancel()
    stats.cancel()
    await _until(lambda: manager.num_watchers == 0)


async def test_watchers_that_come_and_go_leave_nothing_behind(
    manager: Manager, stub: admin_pb2_grpc.AdminServiceStub
) -> None:
    num_tasks = len(asyncio.all_tasks())
    for index in range(20):
        events = stub.WatchEvents(admin_pb2.WatchEventsRequest())
        stats = stub.WatchStats(admin_pb2.WatchStatsRequest())
        if index % 2:
            await events.read()
            await stats.read()
            manager.store(1)
        events.cancel()
        stats.cancel()
    await _until(lambda: manager.num_watchers == 0 and manager.policy._pool.listener is None)
    gc.collect()
    await _until(lambda: len(asyncio.all_tasks()) <= num_tasks)
