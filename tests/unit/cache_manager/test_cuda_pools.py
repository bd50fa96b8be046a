"""Pools of a played GPU, by CUDA IPC and by CUDA VMM alike: their checks, their views, their ends."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from cache_manager.memory.cuda_driver import CudaStatus
from cache_manager.memory.interface import PoolMemory
from cache_manager.memory.mapping import map_pool
from pagekeeper.common.errors import BugError, ConfigurationError
from tests.fakes.cuda_driver import FakeCudaDriver
from tests.fakes.cuda_memory import FakeGpu
from tests.fakes.pools import CUDA_BACKENDS, SIZE, Host, bytes_of


@pytest.fixture(params=CUDA_BACKENDS)
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    made = Host(request.param)
    yield made
    assert made.gpu.misuses == []
    made.gpu.close()


@pytest.fixture
def memory(host: Host) -> Iterator[PoolMemory]:
    with closing(host.make()) as made:
        yield made


@pytest.fixture
def runner(host: Host) -> FakeCudaDriver:
    return FakeCudaDriver(host.gpu, "runner")


# The manager's end


def test_a_pool_larger_than_the_free_device_memory_is_refused(host: Host) -> None:
    other = FakeCudaDriver(host.gpu, "other")
    other.allocate(host.gpu.total - SIZE)
    wanted = SIZE * 64
    with pytest.raises(
        ConfigurationError, match=f"^pool_size: {wanted} bytes are wanted, {SIZE} bytes of device memory are free$"
    ):
        host.make(wanted)
    assert host.manager.leaks() == []


def test_memory_that_another_process_took_first_is_named(host: Host) -> None:
    host.manager.fail_with = {"allocate": CudaStatus.OUT_OF_MEMORY, "create": CudaStatus.OUT_OF_MEMORY}
    with pytest.raises(ConfigurationError, match=r"^pool_size: cannot take \d+ bytes of device memory: .*MEMORY"):
        host.make()
    assert host.manager.leaks() == []


def test_a_gpu_under_mps_is_refused_at_both_ends(host: Host, memory: PoolMemory, runner: FakeCudaDriver) -> None:
    host.gpu.mps = True
    with pytest.raises(ConfigurationError, match=r"^gpu: GPU-fake-0 is under MPS"):
        host.make()
    with pytest.raises(ConfigurationError, match=r"^gpu: GPU-fake-0 is under MPS"):
        host.open(memory, runner)


def test_a_manager_that_ends_gives_everything_back(host: Host, memory: PoolMemory) -> None:
    assert host.gpu.used() == memory.size
    host.end_manager(memory)
    memory.close()
    assert memory.descriptors() == []
    assert host.gpu.used() == 0


# The runner's end


def test_another_gpu_is_named(host: Host, memory: PoolMemory) -> None:
    other = FakeGpu(uuid="GPU-fake-1")
    runner = FakeCudaDriver(other, "runner")
    with pytest.raises(
        ConfigurationError, match=r"^gpu: the pool is on GPU-fake-0 and this runner on GPU-fake-1; give the"
    ):
        host.open(memory, runner)
    assert runner.calls == ["is_under_mps"]


def test_memory_without_the_mark_is_not_taken_for_the_pool(
    host: Host, memory: PoolMemory, runner: FakeCudaDriver
) -> None:
    handle = replace(memory.handle(), pattern=bytes(16))
    with pytest.raises(ConfigurationError, match=r"^pool_memory: what was mapped is not the cache manager's pool"):
        map_pool(handle, memory.descriptors(), runner)
    assert runner.leaks() == []


def test_the_mark_is_written_at_every_attachment(host: Host, memory: PoolMemory, runner: FakeCudaDriver) -> None:
    with closing(host.open(memory, runner)) as mapped:
        bytes_of(mapped)[:100] = 0
        with closing(host.open(memory, FakeCudaDriver(host.gpu, "second"))):
            pass
        handle = memory.handle()
        assert bytes_of(mapped)[:16].tobytes() == handle.pattern
        assert not bytes_of(mapped)[16:100].any()


def test_pools_have_marks_of_their_own(host: Host, memory: PoolMemory) -> None:
    with closing(host.make()) as other:
        assert memory.handle().pattern != other.handle().pattern
    assert memory.handle() == memory.handle()


def test_a_pool_is_not_unmapped_under_a_view(host: Host, memory: PoolMemory, runner: FakeCudaDriver) -> None:
    mapped = host.open(memory, runner)
    view = bytes_of(mapped)[100:200]
    with pytest.raises(BugError, match="unbind the device and drop every view"):
        mapped.close()
    view[0] = 1
    assert bytes_of(mapped)[100] == 1
    del view
    mapped.close()
    assert runner.leaks() == []
    with pytest.raises(BugError, match="closed"):
        mapped.array()


def test_a_view_in_a_cycle_does_not_keep_the_pool(host: Host, memory: PoolMemory, runner: FakeCudaDriver) -> None:
    mapped = host.open(memory, runner)
    cycle = [bytes_of(mapped)]
    cycle.append(cycle)
    del cycle
    mapped.close()
    assert runner.leaks() == []


def test_the_device_has_finished_before_the_pool_is_unmapped(
    host: Host, memory: PoolMemory, runner: FakeCudaDriver
) -> None:
    mapped = host.open(memory, runner)
    runner.calls.clear()
    mapped.close()
    assert runner.calls[0] == "synchronize"


@pytest.mark.parametrize("code", [*CudaStatus, 719])
def test_whatever_the_driver_says_is_named(host: Host, memory: PoolMemory, runner: FakeCudaDriver, code: int) -> None:
    call = "open_handle" if host.backend == "cuda_ipc" else "import_descriptor"
    runner.fail_with = {call: code}
    name = CudaStatus(code).name if code in list(CudaStatus) else "CUDA_ERROR_719"
    with pytest.raises(ConfigurationError, match=rf"^pool_(memory|size): .*{name}"):
        host.open(memory, runner)
    assert runner.leaks() == []
