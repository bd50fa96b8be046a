"""A manager and its runners with a played GPU: real streams, a real hand-over socket, real descriptors."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import grpc
import pytest

from cache_manager import client as client_module
from cache_manager.client import CacheClient, CacheConnectionLost
from cache_manager.config import ManagerSettings
from cache_manager.handover import HandoverClient, HandoverServer, RunnerConnection
from cache_manager.memory.cuda_driver import CudaError, CudaStatus
from cache_manager.quarantine import Quarantine
from cache_manager.service import CacheService
from cache_manager.sessions import CachePolicy
from cache_manager.shared_pool import SharedPool, open_pool
from pagekeeper.common.errors import BugError, ConfigurationError
from pagekeeper.common.operations import Release, Seal
from pagekeeper.common.settings import load_settings
from pagekeeper.common.sockets import RuntimeDir, unix_target
from pagekeeper.v1 import cache_pb2_grpc
from tests.fakes.cuda_driver import GRANULARITY, FakeCudaDriver
from tests.fakes.cuda_memory import FakeGpu
from tests.fakes.local_cache import FINGERPRINT, TINY_LAYOUT
from tests.fakes.policy_session import opening, tokens
from tests.fakes.pools import bytes_of

LIMIT_S = 20.0


class Manager:
    """Everything of a cache manager but its process."""

    def __init__(self, runtime_dir: Path, driver: FakeCudaDriver, *flags: str) -> None:
        self.runtime_dir = RuntimeDir(runtime_dir)
        self._driver = driver
        settings = load_settings(ManagerSettings, ["--pool-size", str(4 * GRANULARITY), *flags])
        self.pool: SharedPool = open_pool(settings, lambda _: driver, lambda *_: None)
        self.policy = CachePolicy(self.pool.size)
        self.quarantine = Quarantine(self.policy.settle, 0.0)

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator["Manager"]:
        service = CacheService(self.policy, self.pool, "start", self.quarantine)
        server = grpc.aio.server()
        cache_pb2_grpc.add_CacheServiceServicer_to_server(service, server)
        server.add_insecure_port(unix_target(self.runtime_dir.cache_socket))
        await server.start()
        self._handover = HandoverServer(self.runtime_dir.handover_socket, service)
        self._handover.start()
        try:
            yield self
        finally:
            self.die()
            await server.stop(None)
            self.quarantine.close()
            self.pool.close()
            self._driver.end()

    def die(self) -> None:
        """What runners see first of a manager's death: the end of the hand-over connection."""
        handover, self._handover = self._handover, None
        if handover is not None:
            handover.close()

    async def connect(self, cuda: FakeCudaDriver | None, limit_s: float = LIMIT_S) -> CacheClient:
        arguments = (self.runtime_dir, "runner", TINY_LAYOUT, FINGERPRINT, limit_s, cuda)
        return await asyncio.to_thread(CacheClient.connect, *arguments)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                await asyncio.sleep(0.005)


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    made = FakeGpu()
    yield made
    assert made.misuses == []
    assert made.used() == 0
    made.close()


@pytest.fixture
def runner(gpu: FakeGpu) -> Iterator[FakeCudaDriver]:
    driver = FakeCudaDriver(gpu, "runner")
    yield driver
    assert driver.leaks() == []


@pytest.fixture(params=["cuda_ipc", "cuda_vmm", "auto"])
async def manager(request: pytest.FixtureRequest, runtime_dir: Path, gpu: FakeGpu) -> AsyncIterator[Manager]:
    async with Manager(runtime_dir, FakeCudaDriver(gpu), "--pool-memory", request.param).serve() as serving:
        yield serving


@pytest.fixture
def out_of_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on runners are in another PID namespace."""
    connect = RunnerConnection.__init__

    def connect_unseen(self: RunnerConnection, *args: object) -> None:
        connect(self, *args)
        self.pid = 0

    monkeypatch.setattr(RunnerConnection, "__init__", connect_unseen)


def _noted(closed: list[HandoverClient], close: Callable[[HandoverClient], None]) -> Callable[[HandoverClient], None]:
    """Like `close`, but every call is noted."""

    def noted(client: HandoverClient) -> None:
        closed.append(client)
        close(client)

    return noted


async def _exchange(client: CacheClient, step: int, *operations: object) -> list:
    client.send(step, step - 1, list(operations))
    return await asyncio.to_thread(client.receive, LIMIT_S)


async def test_two_runners_share_the_bytes_of_sealed_blocks(manager: Manager, gpu: FakeGpu) -> None:
    one = await manager.connect(FakeCudaDriver(gpu, "one"))
    (opened,) = await _exchange(one, 1, opening(1, tokens(1)))
    start = opened.blocks[0].id * TINY_LAYOUT.block_bytes
    bytes_of(one.memory)[start : start + 5] = [1, 2, 3, 4, 5]
    await _exchange(one, 2, Seal(1, tokens(1), opened.blocks))
    two = await manager.connect(FakeCudaDriver(gpu, "two"))
    (hit,) = await _exchange(two, 1, opening(9, tokens(2)))
    assert hit.num_cached_tokens == 8
    start = hit.blocks[0].id * TINY_LAYOUT.block_bytes
    assert bytes_of(two.memory)[start : start + 5].tolist() == [1, 2, 3, 4, 5]
    one.close()
    two.close()


async def test_a_session_begun_anew_keeps_the_mapping(manager: Manager, runner: FakeCudaDriver) -> None:
    client = await manager.connect(runner)
    memory, leaks = client.memory, runner.leaks()
    await asyncio.to_thread(client.reattach, LIMIT_S)
    assert client.memory is memory
    assert runner.leaks() == leaks
    client.close()


@pytest.mark.parametrize("manager", ["cuda_vmm"], indirect=True)
async def test_what_memory_has_grown_by_is_mapped_but_not_carved_into_blocks_yet(
    manager: Manager, gpu: FakeGpu, runner: FakeCudaDriver
) -> None:
    before = await manager.connect(runner)
    manager.pool._memory.grow(4 * GRANULARITY)
    after = await manager.connect(FakeCudaDriver(gpu, "late"))
    assert after.memory.size == before.memory.size + 4 * GRANULARITY
    assert after.granted.num_blocks == before.granted.num_blocks
    assert after.memory.size // TINY_LAYOUT.block_bytes > after.granted.num_blocks
    before.close()
    after.close()


async def test_blocks_that_a_view_could_still_write_are_not_free(
    manager: Manager, runner: FakeCudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[HandoverClient] = []
    monkeypatch.setattr(HandoverClient, "close", _noted(said, HandoverClient.close))
    client = await manager.connect(runner)
    await _exchange(client, 1, opening(1, tokens(1)))
    free = manager.policy.stats().pool.free_blocks
    view = bytes_of(client.memory)
    with pytest.raises(BugError, match="unbind"):
        client.close()
    assert said == []
    assert manager.policy.stats().pool.free_blocks == free
    del view
    client.close()
    assert len(said) == 1
    await manager.until(lambda: manager.policy.stats().pool.free_blocks > free)
    assert not manager.policy.sessions()


async def test_a_driver_that_cannot_wait_for_the_device_frees_no_block_until_the_process_ends(
    manager: Manager, runner: FakeCudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[HandoverClient] = []
    monkeypatch.setattr(HandoverClient, "close", _noted(said, HandoverClient.close))
    client = await manager.connect(runner)
    runner.fail_with = {"synchronize": CudaStatus.NOT_PERMITTED}
    with pytest.raises(CudaError):
        client.close()
    client.close()  # as an engine does, whatever became of the first time
    assert said == []
    client._handover.close()


async def test_a_runner_on_the_cpu_is_refused_and_leaves_nothing(manager: Manager) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (names are all that is wanted)
    with pytest.raises(ConfigurationError, match=r"^device: this runner computes on the CPU"):
        await manager.connect(None)
    await manager.until(lambda: not manager.policy.sessions())
    await manager.until(lambda: len(os.listdir("/proc/self/fd")) <= before)  # noqa: PTH208 (as above)


async def test_a_runner_on_another_gpu_is_refused(manager: Manager) -> None:
    with pytest.raises(ConfigurationError, match=r"^gpu: the pool is on GPU-fake-0 and this runner on GPU-fake-1"):
        await manager.connect(FakeCudaDriver(FakeGpu(uuid="GPU-fake-1"), "runner"))
    await manager.until(lambda: not manager.policy.sessions())


@pytest.mark.parametrize("manager", ["auto"], indirect=True)
async def test_a_runner_out_of_sight_gets_a_pool_that_reaches_it(
    manager: Manager, gpu: FakeGpu, out_of_sight: None
) -> None:
    client = await manager.connect(FakeCudaDriver(gpu, "runner", pid_namespace="container"))
    assert manager.pool.backend == "cuda_vmm"
    assert client.memory.size >= client.granted.num_blocks * TINY_LAYOUT.block_bytes
    client.close()


@pytest.mark.parametrize("manager", ["auto"], indirect=True)
async def test_a_pool_made_anew_finds_nothing_of_the_old_one(
    manager: Manager, gpu: FakeGpu, runner: FakeCudaDriver, request: pytest.FixtureRequest
) -> None:
    client = await manager.connect(runner)
    (opened,) = await _exchange(client, 1, opening(1, tokens(2)))
    await _exchange(client, 2, Seal(1, tokens(2), opened.blocks), Release(1))
    client.close()
    await manager.until(lambda: not manager.policy.sessions())
    assert manager.policy.stats().pool.cached_blocks == 2
    request.getfixturevalue("out_of_sight")
    late = await manager.connect(FakeCudaDriver(gpu, "late", pid_namespace="container"))
    (opened,) = await _exchange(late, 1, opening(1, tokens(2)))
    assert opened.num_cached_tokens == 0
    late.close()


@pytest.mark.parametrize("manager", ["auto"], indirect=True)
async def test_a_runner_out_of_sight_of_a_pool_in_use_is_told_what_to_do(
    manager: Manager, gpu: FakeGpu, runner: FakeCudaDriver, request: pytest.FixtureRequest
) -> None:
    client = await manager.connect(runner)
    request.getfixturevalue("out_of_sight")
    with pytest.raises(ConfigurationError, match=r"^pool_memory: this runner is in another PID namespace: .*cuda_vmm$"):
        await manager.connect(FakeCudaDriver(gpu, "late", pid_namespace="container"))
    assert manager.pool.backend == "cuda_ipc"
    client.close()


@pytest.mark.parametrize("manager", ["auto"], indirect=True)
async def test_a_runner_whose_descriptors_are_of_the_old_pool_asks_again(
    manager: Manager, gpu: FakeGpu, runner: FakeCudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = True

    class SlowStream(client_module._Stream):
        """Between this runner's handshake and its attachment, another one has the pool made anew."""

        def __init__(self, *args: object) -> None:
            nonlocal first
            if first:
                assert manager.pool.change_for(0)
                first = False
            super().__init__(*args)

    monkeypatch.setattr(client_module, "_Stream", SlowStream)
    client = await manager.connect(runner)
    assert not first
    assert manager.pool.backend == "cuda_vmm"
    client.close()


@pytest.mark.parametrize("manager", ["cuda_ipc"], indirect=True)
async def test_a_manager_that_dies_before_its_pool_is_mapped_is_a_lost_connection(
    manager: Manager, runner: FakeCudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()

    def die(*args: object) -> None:
        loop.call_soon_threadsafe(manager.die)
        raise ConfigurationError("pool_memory: the driver no longer knows the handle")

    monkeypatch.setattr(client_module, "map_pool", die)
    with pytest.raises(CacheConnectionLost, match="no cache manager serves"):
        await manager.connect(runner, limit_s=0.5)
