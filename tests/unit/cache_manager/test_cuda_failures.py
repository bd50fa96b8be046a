"""Whichever call of the driver fails, nothing is left behind: tried for each one in turn, on a played GPU."""

import os
from collections.abc import Callable, Iterator

import pytest

from cache_manager.memory.cuda_driver import CudaError
from cache_manager.memory.cuda_ipc import CudaIpcPool
from pagekeeper.common.errors import ConfigurationError
from tests.fakes.cuda_driver import GRANULARITY, FakeCudaDriver
from tests.fakes.pools import CUDA_BACKENDS, Host

# What is lost for good when giving it up has failed, and what cannot be given up without it.
LOST = {
    "free": {"allocation"},
    "close_handle": {"opened"},
    "unmap": {"mapping", "reservation"},
    "release": {"handle"},
    "unreserve": {"reservation"},
    "synchronize": set(),
}


def _num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (names are all that is wanted)


def _failing(driver: FakeCudaDriver, action: Callable[[], object]) -> Iterator[CudaError | ConfigurationError]:
    """Let the first call of `action` fail, then in another try the second, until it succeeds."""
    for number in range(1, 100):
        driver.fail_at = len(driver.calls) + number
        try:
            action()
        except (CudaError, ConfigurationError) as error:
            driver.fail_at = 0
            yield error
        else:
            driver.fail_at = 0
            return
    pytest.fail("it has no end")


@pytest.fixture(params=CUDA_BACKENDS)
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    made = Host(request.param)
    yield made
    made.gpu.close()


def test_a_pool_that_cannot_be_made_leaves_nothing(host: Host) -> None:
    descriptors, made = _num_descriptors(), []
    errors = 0
    for error in _failing(host.manager, lambda: made.append(host.make())):
        errors += 1
        assert str(error).startswith("pool_memory: cannot make the pool by CUDA ")
        assert "CUDA_ERROR_UNKNOWN" in str(error)
        assert host.manager.leaks() == host.gpu.misuses == []
        assert host.gpu.used() == 0
        for allocation in host.gpu.allocations:
            os.close(allocation.file)
        host.gpu.allocations.clear()
        assert _num_descriptors() == descriptors
    assert errors == {"cuda_ipc": 4, "cuda_vmm": 8}[host.backend]
    made[0].close()


def test_a_pool_that_cannot_be_opened_leaves_nothing(host: Host) -> None:
    memory, runner = host.make(), FakeCudaDriver(host.gpu, "runner")
    descriptors, mapped = _num_descriptors(), []
    errors = 0
    for error in _failing(runner, lambda: mapped.append(host.open(memory, runner))):
        errors += 1
        assert isinstance(error, ConfigurationError)
        assert "CUDA_ERROR_UNKNOWN" in str(error)
        assert runner.leaks() == host.gpu.misuses == []
        assert _num_descriptors() == descriptors
    assert errors == {"cuda_ipc": 4, "cuda_vmm": 6}[host.backend]
    mapped[0].close()
    host.end_manager(memory)
    assert host.gpu.used() == 0


def test_a_pool_that_cannot_grow_is_as_before() -> None:
    host = Host("cuda_vmm")
    memory, grown = host.make(), []
    descriptors, before, leaks = _num_descriptors(), memory.handle(), host.manager.leaks()
    for error in _failing(host.manager, lambda: grown.append(memory.grow(GRANULARITY))):
        assert str(error).startswith("pool_memory: cannot grow the pool: ")
        assert memory.handle() == before
        assert host.manager.leaks() == leaks
        for allocation in host.gpu.allocations[1:]:
            os.close(allocation.file)
        del host.gpu.allocations[1:]
        assert _num_descriptors() == descriptors
    assert memory.size == before.chunk_sizes[0] + GRANULARITY
    memory.close()
    assert host.manager.leaks() == host.gpu.misuses == []
    host.gpu.close()


def test_a_mark_that_cannot_be_written_is_an_error(host: Host) -> None:
    memory = host.make()
    assert len(list(_failing(host.manager, memory.handle))) == 1
    memory.close()


@pytest.mark.parametrize("end", ["manager", "runner"])
def test_one_failure_keeps_nothing_else_from_being_given_back(host: Host, end: str) -> None:
    number = 0
    while True:
        number += 1
        host = Host(host.backend)
        runner = FakeCudaDriver(host.gpu, "runner")
        memory = host.make()
        mapped = host.open(memory, runner)
        give_up = memory.free if isinstance(memory, CudaIpcPool) else memory.close
        driver, close = (host.manager, give_up) if end == "manager" else (runner, mapped.close)
        if end == "manager":
            mapped.close()
        driver.fail_at = len(driver.calls) + number
        try:
            close()
        except CudaError:
            assert {leak.split()[0] for leak in driver.leaks()} == LOST[driver.calls[driver.fail_at - 1]]
            close()
        else:
            assert driver.leaks() == host.gpu.misuses == []
            break
        finally:
            mapped.close()
            memory.close()
            host.gpu.close()
    assert number > 1
