"""What is CUDA VMM's own: granularity, descriptors, growth; the GPU is played."""

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from cache_manager import handover
from cache_manager.memory.cuda_vmm import MAX_CHUNKS, CudaVmmPool, open_cuda_vmm
from cache_manager.memory.interface import MappedPool
from pagekeeper.common.errors import ConfigurationError
from tests.fakes.cuda_driver import GRANULARITY, FakeCudaDriver
from tests.fakes.cuda_memory import FakeGpu
from tests.fakes.pools import bytes_of

SIZE = 2 * GRANULARITY
MAX_SIZE = 10 * GRANULARITY


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    made = FakeGpu()
    yield made
    assert made.misuses == []
    assert made.used() == 0
    made.close()


@pytest.fixture
def pool(gpu: FakeGpu) -> Iterator[CudaVmmPool]:
    with closing(CudaVmmPool(FakeCudaDriver(gpu), SIZE, MAX_SIZE)) as made:
        yield made


@pytest.fixture
def runner(gpu: FakeGpu) -> Iterator[FakeCudaDriver]:
    driver = FakeCudaDriver(gpu, "runner")
    yield driver
    assert driver.leaks() == []


def _open(pool: CudaVmmPool, runner: FakeCudaDriver) -> MappedPool:
    return open_cuda_vmm(runner, pool.handle(), pool.descriptors())


def test_sizes_are_rounded_up_to_the_granularity(gpu: FakeGpu) -> None:
    with closing(CudaVmmPool(FakeCudaDriver(gpu), GRANULARITY + 1)) as pool:
        assert pool.size == gpu.used() == 2 * GRANULARITY


def test_without_a_maximum_the_pool_may_grow_to_all_that_the_gpu_has(gpu: FakeGpu) -> None:
    other = FakeCudaDriver(gpu, "other")
    address = other.allocate(gpu.total - SIZE)
    with closing(CudaVmmPool(FakeCudaDriver(gpu), SIZE)) as pool:
        other.free(address)
        pool.grow(gpu.total - SIZE)
        assert gpu.used() == gpu.total


def test_the_memory_lives_as_long_as_a_descriptor_does(gpu: FakeGpu, runner: FakeCudaDriver) -> None:
    pool = CudaVmmPool(FakeCudaDriver(gpu), SIZE)
    travelling = [os.dup(descriptor) for descriptor in pool.descriptors()]
    handle = pool.handle()
    pool.close()
    assert gpu.used() == SIZE
    with closing(open_cuda_vmm(runner, handle, travelling)):
        os.close(travelling[0])
        assert gpu.used() == SIZE
    assert gpu.used() == 0


def test_descriptors_cross_pid_namespaces(pool: CudaVmmPool, gpu: FakeGpu) -> None:
    with closing(_open(pool, FakeCudaDriver(gpu, "runner", pid_namespace="container"))) as mapped:
        assert mapped.size == SIZE


def test_a_pool_grows_at_its_end_and_keeps_its_bytes(pool: CudaVmmPool, runner: FakeCudaDriver, gpu: FakeGpu) -> None:
    with closing(_open(pool, runner)) as early:
        bytes_of(early)[SIZE - 1] = 5
        pool.grow(GRANULARITY + 1)
        assert (pool.size, early.size) == (SIZE + 2 * GRANULARITY, SIZE)
        with closing(_open(pool, FakeCudaDriver(gpu, "late"))) as late:
            assert late.size == pool.size
            assert bytes_of(late)[SIZE - 1] == 5
            bytes_of(late)[[SIZE - 1, SIZE, late.size - 1]] = [6, 7, 8]
        assert bytes_of(early)[SIZE - 1] == 6
    with closing(_open(pool, runner)) as again:
        assert bytes_of(again)[[SIZE, again.size - 1]].tolist() == [7, 8]


def test_a_pool_does_not_outgrow_its_reservation(pool: CudaVmmPool) -> None:
    with pytest.raises(ConfigurationError, match=f"^pool_size: the pool may grow to {MAX_SIZE} bytes, "):
        pool.grow(MAX_SIZE - SIZE + 1)
    pool.grow(MAX_SIZE - SIZE)
    assert pool.size == MAX_SIZE


def test_a_pool_grows_as_often_as_descriptors_travel(pool: CudaVmmPool) -> None:
    for _ in range(MAX_CHUNKS - 1):
        pool.grow(1)
    with pytest.raises(ConfigurationError, match=r"^pool_size: the pool has grown 3 times, which is the most"):
        pool.grow(1)
    assert len(pool.descriptors()) == MAX_CHUNKS


def test_a_pool_that_cannot_grow_stays_as_it_was(gpu: FakeGpu, runner: FakeCudaDriver) -> None:
    with closing(CudaVmmPool(FakeCudaDriver(gpu), SIZE)) as pool:
        other = FakeCudaDriver(gpu, "other")
        address = other.allocate(gpu.total - SIZE - GRANULARITY)
        before = pool.handle()
        with pytest.raises(ConfigurationError, match=r"^pool_size: 131072 bytes are wanted, 65536 bytes of device"):
            pool.grow(2 * GRANULARITY)
        assert pool.handle() == before
        other.free(address)
        _open(pool, runner).close()


def test_a_pool_smaller_than_announced_is_not_mapped(pool: CudaVmmPool, runner: FakeCudaDriver) -> None:
    handle = replace(pool.handle(), chunk_sizes=(SIZE + GRANULARITY,))
    with pytest.raises(ConfigurationError, match=r"^pool_memory: cannot map the pool by CUDA VMM: .*INVALID_VALUE"):
        open_cuda_vmm(runner, handle, pool.descriptors())


def test_a_descriptor_of_something_else_is_not_mapped(pool: CudaVmmPool, runner: FakeCudaDriver) -> None:
    stranger = os.memfd_create("stranger")
    with pytest.raises(ConfigurationError, match=r"^pool_memory: cannot map the pool by CUDA VMM: .*INVALID_VALUE"):
        open_cuda_vmm(runner, pool.handle(), [stranger])
    os.close(stranger)


def test_every_chunk_has_a_place_on_the_hand_over_socket() -> None:
    assert MAX_CHUNKS <= handover._MAX_DESCRIPTORS
