"""Which memory the pool gets, why, and what happens where a runner cannot reach it; the GPU is played."""

import itertools
import os
from collections.abc import Callable, Iterator

import pytest
import structlog

from cache_manager.config import ManagerSettings
from cache_manager.memory.choose import Choice, choose_backend
from cache_manager.memory.cuda_driver import CudaStatus
from cache_manager.memory.interface import CudaIpcHandle, CudaVmmHandle, MemfdHandle
from cache_manager.memory.self_test import what_fails
from cache_manager.shared_pool import SharedPool, open_pool
from pagekeeper.common.errors import ConfigurationError
from pagekeeper.common.settings import load_settings
from tests.fakes.cuda_driver import FakeCudaDriver
from tests.fakes.cuda_memory import FakeGpu
from tests.fakes.pools import SIZE

NO_DRIVER = "device: cuda cannot be used: there is no driver; install one"
OUT_OF_SIGHT = 0
"""The pid, by SO_PEERCRED, of a runner in another PID namespace."""


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    made = FakeGpu()
    yield made
    assert made.misuses == []
    assert made.used() == 0
    made.close()


@pytest.fixture
def driver(gpu: FakeGpu) -> Iterator[FakeCudaDriver]:
    """Of a manager that ends before the test does."""
    made = FakeCudaDriver(gpu)
    yield made
    made.end()


def _settings(*flags: str) -> ManagerSettings:
    return load_settings(ManagerSettings, ["--pool-size", str(SIZE), *flags])


def _works(handle: CudaIpcHandle, gpu: int) -> None:
    """A self-test."""


def _fails(handle: CudaIpcHandle, gpu: int) -> str:
    return "no such thing in this container"


def _must_not_run(*_: object) -> str:
    raise AssertionError


def _refuse(_: int) -> FakeCudaDriver:
    raise ConfigurationError(NO_DRIVER)


# The decision

CHOICES = {
    # device, pool_memory: with a GPU, without one; "!" begins an error
    ("auto", "auto"): ("cuda_ipc", "memfd"),
    ("auto", "memfd"): ("memfd", "memfd"),
    ("auto", "cuda_ipc"): ("cuda_ipc", "!pool_memory: cuda_ipc cannot be had: device: "),
    ("auto", "cuda_vmm"): ("cuda_vmm", "!pool_memory: cuda_vmm cannot be had: device: "),
    ("cpu", "auto"): ("memfd", "memfd"),
    ("cpu", "memfd"): ("memfd", "memfd"),
    ("cpu", "cuda_ipc"): ("!pool_memory: cuda_ipc is a GPU's memory", "!pool_memory: cuda_ipc is a GPU's memory"),
    ("cpu", "cuda_vmm"): ("!pool_memory: cuda_vmm is a GPU's memory", "!pool_memory: cuda_vmm is a GPU's memory"),
    ("cuda", "auto"): ("cuda_ipc", f"!{NO_DRIVER}"),
    ("cuda", "memfd"): ("!pool_memory: memfd is the CPU's", "!pool_memory: memfd is the CPU's"),
    ("cuda", "cuda_ipc"): ("cuda_ipc", "!pool_memory: cuda_ipc cannot be had: device: "),
    ("cuda", "cuda_vmm"): ("cuda_vmm", "!pool_memory: cuda_vmm cannot be had: device: "),
}


def test_every_wish_has_an_answer() -> None:
    assert set(CHOICES) == set(itertools.product(("auto", "cpu", "cuda"), ("auto", "memfd", "cuda_ipc", "cuda_vmm")))


@pytest.mark.parametrize("has_gpu", [True, False])
@pytest.mark.parametrize(("device", "wanted"), CHOICES)
def test_a_wish_is_met_or_an_error_that_names_the_setting(device: str, wanted: str, has_gpu: bool) -> None:
    expected = CHOICES[device, wanted][0 if has_gpu else 1]
    obstacle = None if has_gpu else NO_DRIVER
    if expected.startswith("!"):
        with pytest.raises(ConfigurationError) as caught:
            choose_backend(device, wanted, obstacle)
        assert str(caught.value).startswith(expected[1:])
    else:
        choice = choose_backend(device, wanted, obstacle)
        assert choice.backend == expected
        assert choice.may_change is (expected == "cuda_ipc" and wanted == "auto")


def test_a_decision_says_why() -> None:
    assert choose_backend("auto", "auto", NO_DRIVER) == Choice("memfd", NO_DRIVER)
    assert choose_backend("cuda", "cuda_vmm", None) == Choice("cuda_vmm", "asked for")


# At start


@pytest.mark.parametrize("flags", [("--device", "cpu"), ("--pool-memory", "memfd")])
def test_a_pool_of_the_cpu_asks_for_no_gpu(flags: tuple[str, ...]) -> None:
    pool = open_pool(_settings(*flags), _must_not_run, _must_not_run)
    assert (pool.backend, pool.size, pool.outlived_by_device_work) == ("memfd", SIZE, False)
    assert pool.handle_for(os.getpid()) == MemfdHandle(SIZE)
    pool.close()


def test_without_a_gpu_the_pool_is_the_cpus_and_the_log_says_why() -> None:
    with structlog.testing.capture_logs() as logs:
        open_pool(_settings(), _refuse).close()
    assert [(line["backend"], line["reason"]) for line in logs] == [("memfd", NO_DRIVER)]


def test_a_gpu_that_was_asked_for_and_is_not_there_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match=f"^{NO_DRIVER}$"):
        open_pool(_settings("--device", "cuda"), _refuse)


def test_the_gpu_is_the_one_that_was_asked_for(driver: FakeCudaDriver) -> None:
    asked: list[int] = []

    def load(index: int) -> FakeCudaDriver:
        asked.append(index)
        return driver

    def self_test(handle: CudaIpcHandle, index: int) -> None:
        asked.append(index)

    open_pool(_settings("--gpu", "3"), load, self_test).close()
    assert asked == [3, 3]


def test_on_a_gpu_it_is_cuda_ipc_if_the_self_test_passes(driver: FakeCudaDriver, gpu: FakeGpu) -> None:
    tested: list[CudaIpcHandle] = []
    pool = open_pool(_settings(), lambda _: driver, lambda handle, _: tested.append(handle))
    assert pool.backend == "cuda_ipc"
    assert pool.outlived_by_device_work
    assert tested == [pool.handle_for(os.getpid())]
    assert gpu.used() == pool.size
    pool.close()


def test_where_the_self_test_fails_it_is_cuda_vmm_and_the_log_says_why(driver: FakeCudaDriver, gpu: FakeGpu) -> None:
    with structlog.testing.capture_logs() as logs:
        pool = open_pool(_settings(), lambda _: driver, _fails)
    assert driver.calls.count("free") == 1
    assert pool.backend == "cuda_vmm"
    assert logs[0]["log_level"] == "warning"
    assert logs[0]["reason"] == "no such thing in this container"
    assert gpu.used() == pool.size
    pool.close()


def test_cuda_ipc_that_was_asked_for_is_not_replaced(driver: FakeCudaDriver) -> None:
    pool = open_pool(_settings("--pool-memory", "cuda_ipc"), lambda _: driver, _must_not_run)
    assert not pool.change_for(OUT_OF_SIGHT)
    assert pool.backend == "cuda_ipc"
    pool.close()


def test_a_self_test_that_is_interrupted_leaves_nothing(driver: FakeCudaDriver) -> None:
    def interrupted(*_: object) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_pool(_settings(), lambda _: driver, interrupted)
    assert driver.leaks() == []


def test_the_real_self_test_says_in_one_line_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    failure = what_fails(CudaIpcHandle(bytes(64), 0, SIZE, "GPU-none", bytes(16)), 0)
    assert failure is not None
    assert failure.startswith("self-test: device: cuda cannot be used: ")


# Runners in other PID namespaces


@pytest.fixture
def automatic(driver: FakeCudaDriver) -> Iterator[SharedPool]:
    pool = open_pool(_settings(), lambda _: driver, _works)
    yield pool
    pool.close()


def test_a_runner_within_reach_changes_nothing(automatic: SharedPool) -> None:
    assert not automatic.change_for(os.getpid())
    assert not automatic.change_for(2**22 + 1)  # no process has it: it has ended already
    assert isinstance(automatic.handle_for(os.getpid()), CudaIpcHandle)
    assert automatic.descriptors() == []


def test_for_a_runner_out_of_reach_the_pool_is_made_anew_once(
    automatic: SharedPool, driver: FakeCudaDriver, gpu: FakeGpu
) -> None:
    with structlog.testing.capture_logs() as logs:
        assert automatic.change_for(OUT_OF_SIGHT)
    assert "CUDA IPC does not cross PID namespaces" in logs[0]["reason"]
    assert driver.calls.count("free") == 1
    assert automatic.backend == "cuda_vmm"
    assert isinstance(automatic.handle_for(OUT_OF_SIGHT), CudaVmmHandle)
    assert len(automatic.descriptors()) == 1
    assert gpu.used() >= automatic.size
    assert not automatic.change_for(OUT_OF_SIGHT)


def test_the_old_pool_is_given_back_before_the_new_one_is_taken(driver: FakeCudaDriver, gpu: FakeGpu) -> None:
    pool = open_pool(_settings("--pool-size", str(gpu.total // 4 * 3)), lambda _: driver, _works)
    assert pool.change_for(OUT_OF_SIGHT)
    assert pool.backend == "cuda_vmm"
    pool.close()


def test_a_runner_out_of_reach_of_a_pool_in_use_is_told_so(automatic: SharedPool) -> None:
    with pytest.raises(ConfigurationError, match=r"^pool_memory: this runner is in another PID namespace: .*cuda_vmm$"):
        automatic.handle_for(OUT_OF_SIGHT)
    assert automatic.backend == "cuda_ipc"


@pytest.mark.parametrize("call", ["create", "free"])
def test_where_the_pool_cannot_be_made_anew_every_runner_is_told_so(
    automatic: SharedPool, driver: FakeCudaDriver, call: str
) -> None:
    driver.fail_with = {call: CudaStatus.NOT_SUPPORTED}
    with structlog.testing.capture_logs() as logs:
        assert automatic.change_for(OUT_OF_SIGHT)
    assert "NOT_SUPPORTED" in logs[-1]["error"]
    assert (automatic.backend, automatic.outlived_by_device_work, automatic.descriptors()) == ("none", False, [])
    for pid in (OUT_OF_SIGHT, os.getpid()):
        assert not automatic.change_for(pid)
        with pytest.raises(ConfigurationError, match=r"^pool_memory: there is no pool any more"):
            automatic.handle_for(pid)


def test_another_namespace_is_seen_by_its_name_too(automatic: SharedPool, monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, str] = {"/proc/self/ns/pid": "pid:[1]", "/proc/77/ns/pid": "pid:[2]"}
    real: Callable[..., str] = os.readlink
    monkeypatch.setattr(os, "readlink", lambda path, **kwargs: names.get(str(path)) or real(path, **kwargs))
    with pytest.raises(ConfigurationError, match="another PID namespace"):
        automatic.handle_for(77)
