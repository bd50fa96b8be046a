"""What is CUDA IPC's own: handles, bounds, and the causes of failures; the GPU is played."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from cache_manager.memory.cuda_driver import CudaError, CudaStatus
from cache_manager.memory.cuda_ipc import CudaIpcPool, open_cuda_ipc
from pagekeeper.common.errors import ConfigurationError
from tests.fakes.cuda_driver import FakeCudaDriver
from tests.fakes.cuda_memory import FakeGpu
from tests.fakes.pools import bytes_of

UNIT = 2 << 20


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    made = FakeGpu()
    yield made
    made.close()


@pytest.fixture
def manager(gpu: FakeGpu) -> FakeCudaDriver:
    return FakeCudaDriver(gpu)


@pytest.fixture
def pool(manager: FakeCudaDriver) -> CudaIpcPool:
    return CudaIpcPool(manager, UNIT)


@pytest.fixture
def runner(gpu: FakeGpu) -> FakeCudaDriver:
    return FakeCudaDriver(gpu, "runner")


def test_only_whole_units_are_allocated_so_that_nothing_else_is_exported(manager: FakeCudaDriver) -> None:
    assert CudaIpcPool(manager, 1).size == UNIT
    assert CudaIpcPool(manager, UNIT + 1).size == 2 * UNIT


def test_no_descriptor_travels(pool: CudaIpcPool) -> None:
    assert pool.descriptors() == []
    assert len(pool.handle().handle) == 64


@pytest.mark.parametrize(
    ("offset", "size"), [(0, UNIT + 1), (1, UNIT), (UNIT, 1), (1 << 63, UNIT), (0, 1 << 63), (1 << 63, 1 << 63)]
)
def test_a_pool_outside_its_allocation_is_not_mapped(
    pool: CudaIpcPool, runner: FakeCudaDriver, gpu: FakeGpu, offset: int, size: int
) -> None:
    with pytest.raises(ConfigurationError, match=f"^pool_memory: the pool should be {size} bytes at {offset}, but"):
        open_cuda_ipc(runner, replace(pool.handle(), offset=offset, size=size))
    assert runner.leaks() == gpu.misuses == []


def test_a_pool_may_lie_anywhere_in_its_allocation(
    pool: CudaIpcPool, manager: FakeCudaDriver, runner: FakeCudaDriver
) -> None:
    handle = pool.handle()
    base = next(iter(manager._raw))
    manager.write(base, bytes(4096) + handle.pattern)
    with closing(open_cuda_ipc(runner, replace(handle, offset=4096, size=UNIT - 4096))) as mapped:
        assert bytes_of(mapped)[:16].tobytes() == handle.pattern
        assert len(bytes_of(mapped)) == UNIT - 4096
    assert runner.leaks() == []


def test_a_process_has_one_mapping_however_often_it_opens(
    pool: CudaIpcPool, runner: FakeCudaDriver, gpu: FakeGpu
) -> None:
    one, two = open_cuda_ipc(runner, pool.handle()), open_cuda_ipc(runner, pool.handle())
    assert len(runner.leaks()) == 1
    one.close()
    bytes_of(two)[100] = 1
    two.close()
    assert runner.leaks() == gpu.misuses == []


def test_a_runner_in_another_pid_namespace_is_told_what_to_do(pool: CudaIpcPool, gpu: FakeGpu) -> None:
    runner = FakeCudaDriver(gpu, "runner", pid_namespace="container")
    with pytest.raises(ConfigurationError, match=r"another PID namespace: .*pid: service:NAME.*cuda_vmm.*201|CONTEXT"):
        open_cuda_ipc(runner, pool.handle())
    assert runner.leaks() == []


def test_the_exporter_cannot_open_its_own_handle(pool: CudaIpcPool, manager: FakeCudaDriver) -> None:
    with pytest.raises(CudaError) as caught:
        manager.open_handle(pool.handle().handle)
    assert caught.value.code == CudaStatus.INVALID_CONTEXT


def test_a_gpu_of_the_same_name_that_is_another_one_is_told_by_the_driver(pool: CudaIpcPool) -> None:
    runner = FakeCudaDriver(FakeGpu(), "runner")
    with pytest.raises(ConfigurationError, match=r"^pool_memory: the pool is on a GPU that this process does not see"):
        open_cuda_ipc(runner, pool.handle())


def test_a_manager_that_ends_in_good_order_frees_nothing_under_a_runner(
    pool: CudaIpcPool, manager: FakeCudaDriver, runner: FakeCudaDriver, gpu: FakeGpu
) -> None:
    mapped = open_cuda_ipc(runner, pool.handle())
    pool.close()
    assert "free" not in manager.calls
    manager.end()
    bytes_of(mapped)[100] = 1
    mapped.close()
    assert gpu.used() == 0
    assert gpu.misuses == []


def test_a_pool_that_nobody_has_can_be_freed_for_another_one(
    pool: CudaIpcPool, manager: FakeCudaDriver, runner: FakeCudaDriver, gpu: FakeGpu
) -> None:
    open_cuda_ipc(runner, pool.handle()).close()
    pool.free()
    pool.free()
    assert manager.leaks() == gpu.misuses == []
    assert gpu.used() == 0


def test_a_dead_managers_pool_stays_with_who_has_it_and_nobody_else_can_open_it(
    pool: CudaIpcPool, manager: FakeCudaDriver, runner: FakeCudaDriver, gpu: FakeGpu
) -> None:
    mapped = open_cuda_ipc(runner, pool.handle())
    handle = pool.handle()
    manager.end()
    bytes_of(mapped)[100] = 1
    with pytest.raises(ConfigurationError, match="its cache manager has ended"):
        open_cuda_ipc(FakeCudaDriver(gpu, "late"), handle)
    assert gpu.used() == UNIT
    mapped.close()
    assert gpu.used() == 0
