"""What every kind of pool memory does alike, at both ends; the GPU is played."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from cache_manager.memory.interface import PoolMemory
from cache_manager.memory.mapping import StaleDescriptors, map_pool
from pagekeeper.common.errors import ConfigurationError
from tests.fakes.cuda_driver import FakeCudaDriver
from tests.fakes.pools import BACKENDS, SIZE, Host, bytes_of


@pytest.fixture(params=BACKENDS)
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    """One where nothing is left after the manager's end, and no rule was broken."""
    made = Host(request.param)
    yield made
    made.manager.end()
    assert made.gpu.misuses == []
    assert made.gpu.used() == 0
    made.gpu.close()


@pytest.fixture
def memory(host: Host) -> Iterator[PoolMemory]:
    with closing(host.make()) as made:
        yield made


def test_it_is_named_and_at_least_as_large_as_wanted(host: Host, memory: PoolMemory) -> None:
    assert memory.backend == host.backend
    assert memory.size >= SIZE
    assert memory.outlived_by_device_work is (host.backend != "memfd")


def test_all_runners_see_the_same_bytes(host: Host, memory: PoolMemory) -> None:
    with closing(host.open(memory, host.runner("one"))) as one, closing(host.open(memory, host.runner("two"))) as two:
        assert one.size == two.size == memory.size == len(bytes_of(one))
        bytes_of(one)[-4:] = [1, 2, 3, 4]
        bytes_of(two)[1000] = 7
        assert bytes_of(two)[-4:].tolist() == [1, 2, 3, 4]
        assert bytes_of(one)[1000] == 7


def test_a_mapping_outlives_a_manager_that_ends_in_good_order(host: Host, memory: PoolMemory) -> None:
    with closing(host.open(memory, host.runner())) as mapped:
        bytes_of(mapped)[100:103] = [1, 2, 3]
        host.end_manager(memory)
        assert bytes_of(mapped)[100:103].tolist() == [1, 2, 3]


def test_a_runner_that_leaves_takes_nothing_away(host: Host, memory: PoolMemory) -> None:
    with closing(host.open(memory, host.runner("one"))) as one:
        bytes_of(one)[100] = 9
    with closing(host.open(memory, host.runner("two"))) as two:
        assert bytes_of(two)[100] == 9


def test_a_mapping_may_be_closed_twice(host: Host, memory: PoolMemory) -> None:
    mapped = host.open(memory, host.runner())
    mapped.close()
    mapped.close()


def test_a_runner_on_the_other_kind_of_device_is_told_so(host: Host, memory: PoolMemory) -> None:
    other = FakeCudaDriver(host.gpu, "runner") if host.backend == "memfd" else None
    with pytest.raises(ConfigurationError, match=r"^device: this runner computes on .* give the cache manager and the"):
        host.open(memory, other)


def test_descriptors_of_earlier_memory_are_refused(host: Host, memory: PoolMemory) -> None:
    with pytest.raises(StaleDescriptors):
        map_pool(memory.handle(), [*memory.descriptors(), 0], host.runner())
