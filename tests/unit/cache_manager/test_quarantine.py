"""A pool whose device work outlives its runners: real ones, really killed, on memory that only claims to be a GPU's."""

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest

from cache_manager.client import CacheClient
from cache_manager.handover import HandoverServer
from cache_manager.memory.memfd import MemfdPool
from cache_manager.quarantine import Quarantine
from cache_manager.service import CacheService
from cache_manager.shared_pool import SharedPool
from pagekeeper.common.ids import Epoch
from pagekeeper.common.sockets import RuntimeDir, unix_target
from pagekeeper.v1 import cache_pb2_grpc
from tests.fakes.local_cache import FINGERPRINT, TINY_LAYOUT
from tests.fakes.policy_session import opening, tiny_policy, tokens

LIMIT_S = 20.0
NUM_BLOCKS = 32
SETTLE_S = 5.0
ROOT = Path(__file__).parents[3]


class DevicePool(MemfdPool):
    """As a GPU's: what a runner has queued may outlive it."""

    outlived_by_device_work = True


class HeldTimers:
    """Timers that fire when a test says so."""

    def __init__(self) -> None:
        self.delays: list[float] = []
        self.running: list[Callable[[], None]] = []

    def __call__(self, delay_s: float, callback: Callable[[], None]) -> "HeldTimer":
        self.delays.append(delay_s)
        self.running.append(callback)
        return HeldTimer(self, callback)

    def fire(self) -> None:
        """The oldest one."""
        self.running.pop(0)()


class HeldTimer:
    def __init__(self, timers: HeldTimers, callback: Callable[[], None]) -> None:
        self.timers = timers
        self.callback = callback

    def cancel(self) -> None:
        self.timers.running.remove(self.callback)


class Manager:
    """A cache manager in this process."""

    def __init__(self, runtime_dir: Path, settle_s: float, timers: HeldTimers | None) -> None:
        self.runtime_dir = RuntimeDir(runtime_dir)
        self.policy = tiny_policy(NUM_BLOCKS)
        self.timers = timers or HeldTimers()
        more = {} if timers is None else {"call_later": timers}
        self.quarantine = Quarantine(self.policy.settle, settle_s, **more)

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator["Manager"]:
        memory = DevicePool(NUM_BLOCKS * TINY_LAYOUT.block_bytes, preallocate=False)
        service = CacheService(self.policy, SharedPool(memory), "start", self.quarantine)
        server = grpc.aio.server()
        cache_pb2_grpc.add_CacheServiceServicer_to_server(service, server)
        server.add_insecure_port(unix_target(self.runtime_dir.cache_socket))
        await server.start()
        handover = HandoverServer(self.runtime_dir.handover_socket, service)
        handover.start()
        try:
            yield self
        finally:
            handover.close()
            await server.stop(None)
            self.quarantine.close()
            memory.close()

    def counts(self) -> tuple[int, int, int]:
        """Quarantined, leased and free blocks."""
        assert self.policy.check_integrity() == []
        pool = self.policy.stats().pool
        return pool.quarantined_blocks, pool.leased_blocks, pool.free_blocks

    def states(self) -> list[str]:
        return [session.state for session in self.policy.stats().sessions]

    def connect(self) -> CacheClient:
        return CacheClient.connect(self.runtime_dir, "runner", TINY_LAYOUT, FINGERPRINT, LIMIT_S)


@pytest.fixture
async def manager(runtime_dir: Path) -> AsyncIterator[Manager]:
    async with Manager(runtime_dir, SETTLE_S, HeldTimers()).serve() as serving:
        yield serving


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def runner(manager: Manager, base: int = 0) -> AsyncIterator[Process]:
    """A process with one sequence of five blocks, of which two are sealed."""
    arguments = [str(manager.runtime_dir.path), str(base), "5", "2"]
    command = [sys.executable, "-m", "tests.fakes.cache_runner", *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, cwd=ROOT)
    try:
        async with asyncio.timeout(LIMIT_S):
            assert process.stdout is not None
            assert await process.stdout.readline() == b"ready\n"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_what_a_killed_runner_had_leased_is_quarantined_until_it_has_settled(manager: Manager) -> None:
    async with runner(manager) as child:
        assert manager.counts() == (0, 3, 26)
        child.kill()
        await _until(lambda: bool(manager.timers.running))
    assert manager.timers.delays == [SETTLE_S]
    assert manager.counts() == (3, 0, 28)
    assert manager.states() == ["quarantined"]
    manager.timers.fire()
    assert manager.counts() == (0, 0, 31)
    assert manager.states() == []


async def test_without_a_settle_time_the_end_of_the_process_is_enough(runtime_dir: Path) -> None:
    async with Manager(runtime_dir, 0.0, None).serve() as manager:
        async with runner(manager) as child:
            child.kill()
            await _until(lambda: not manager.states())
        assert manager.counts() == (0, 0, 31)


async def test_quarantined_blocks_are_granted_to_nobody(manager: Manager) -> None:
    async with runner(manager) as first:
        first.kill()
        await _until(lambda: manager.states() == ["quarantined"])
        async with runner(manager, base=100):
            assert sorted(manager.states()) == ["attached", "quarantined"]
            assert manager.counts() == (3, 3, 23)
            await _until(lambda: bool(manager.timers.running))
            manager.timers.fire()
            assert manager.counts() == (0, 3, 26)


async def test_two_dead_runners_settle_each_in_its_own_time(manager: Manager) -> None:
    async with runner(manager) as first, runner(manager, base=100) as second:
        first.kill()
        second.kill()
        await _until(lambda: len(manager.timers.running) == 2)
        assert manager.counts() == (6, 0, 25)
        manager.timers.fire()
        assert manager.counts() == (3, 0, 28)
        manager.timers.fire()
        assert manager.counts() == (0, 0, 31)


async def test_a_runner_that_says_goodbye_leaves_nothing_in_quarantine(manager: Manager) -> None:
    client = await asyncio.to_thread(manager.connect)
    client.send(1, 0, [opening(1, tokens(4))])
    await asyncio.to_thread(client.receive, LIMIT_S)
    assert manager.counts() == (0, 4, 27)
    await asyncio.to_thread(client.close)
    await _until(lambda: not manager.states())
    assert manager.counts() == (0, 0, 31)
    assert manager.timers.delays == []


async def test_a_manager_that_stops_forgets_who_is_in_quarantine(runtime_dir: Path) -> None:
    before = _num_descriptors()
    async with Manager(runtime_dir, SETTLE_S, HeldTimers()).serve() as manager, runner(manager) as child:
        child.kill()
        await _until(lambda: bool(manager.timers.running))
    assert manager.timers.running == []
    assert manager.states() == ["quarantined"]
    await _until(lambda: _num_descriptors() <= before)


async def test_a_process_that_lives_on_without_its_connection_stays_in_quarantine() -> None:
    timers, settled = HeldTimers(), list[Epoch]()
    quarantine = Quarantine(settled.append, SETTLE_S, timers)
    process = await asyncio.create_subprocess_exec("sleep", "600")
    quarantine.hold([Epoch(1), Epoch(2)], os.pidfd_open(process.pid))
    await asyncio.sleep(0.05)
    assert timers.running == []
    process.kill()
    await process.wait()
    await _until(lambda: len(timers.running) == 2)
    timers.fire()
    timers.fire()
    assert settled == [1, 2]


async def test_a_process_that_ended_first_settles_as_well() -> None:
    timers, settled = HeldTimers(), list[Epoch]()
    quarantine = Quarantine(settled.append, SETTLE_S, timers)
    process = await asyncio.create_subprocess_exec("sleep", "600")
    pidfd = os.pidfd_open(process.pid)
    process.kill()
    await process.wait()
    quarantine.hold([Epoch(1)], pidfd)
    await _until(lambda: bool(timers.running))
    timers.fire()
    assert settled == [1]


async def test_a_manager_that_stops_first_closes_the_pidfds() -> None:
    quarantine = Quarantine(lambda _: None, SETTLE_S)
    pidfd = os.pidfd_open(os.getpid())
    quarantine.hold([Epoch(1)], pidfd)
    quarantine.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(pidfd)


def _num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
