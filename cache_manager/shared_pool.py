"""The pool's memory as the manager has it: chosen at start, and changed only where a runner could not reach it."""

import os
from collections.abc import Callable

import structlog

from cache_manager.config import ManagerSettings
from cache_manager.memory.choose import Choice, choose_backend
from cache_manager.memory.cuda_driver import CudaDriver
from cache_manager.memory.cuda_ipc import OTHER_PID_NAMESPACE, CudaIpcPool
from cache_manager.memory.cuda_vmm import CudaVmmPool
from cache_manager.memory.cupy_driver import load_cuda_driver
from cache_manager.memory.interface import CudaIpcHandle, MemoryHandle, PoolMemory
from cache_manager.memory.memfd import MemfdPool
from cache_manager.memory.self_test import what_fails
from pagekeeper.common.errors import ConfigurationError, PagekeeperError

_log = structlog.get_logger()


class SharedPool:
    """Pool memory that runners in other PID namespaces can be given too.

    Args:
        memory: what there is.
        make_other: makes memory as large that crosses PID namespaces, if that is allowed. It frees `memory` before, as
            both may not fit into the device.
    """

    def __init__(self, memory: PoolMemory, make_other: Callable[[], PoolMemory] | None = None) -> None:
        self._memory: PoolMemory | None = memory
        self._make_other = make_other
        self.size = memory.size
        """Bytes, for as long as this lives."""

    @property
    def backend(self) -> str:
        """As statistics name it."""
        return self._memory.backend if self._memory else "none"

    @property
    def outlived_by_device_work(self) -> bool:
        """See `PoolMemory`."""
        return self._memory is not None and self._memory.outlived_by_device_work

    def descriptors(self) -> list[int]:
        """What a runner needs to map it, besides the handle."""
        return self._memory.descriptors() if self._memory else []

    def change_for(self, pid: int) -> bool:
        """Make the pool anew if the runner could not reach it; whether that was done. Nobody may have it mapped.

        Args:
            pid: as SO_PEERCRED gives it, 0 for a process that this PID namespace does not see.
        """
        if self._make_other is None or self._memory is None or not self._is_out_of_reach(pid):
            return False
        _log.warning("making the pool anew by CUDA VMM, the cache is lost", pid=pid, reason=OTHER_PID_NAMESPACE)
        self._memory = None
        try:
            self._memory = self._make_other()
        except PagekeeperError as error:
            _log.error("there is no pool any more", error=str(error))
        return True

    def handle_for(self, pid: int) -> MemoryHandle:
        """What a runner is told that attaches now.

        Raises:
            ConfigurationError: it cannot reach the pool, or there is none.
        """
        if self._memory is None:
            raise ConfigurationError("pool_memory: there is no pool any more; the cache manager's log says why")
        if self._is_out_of_reach(pid):
            raise ConfigurationError(f"pool_memory: this runner is in another PID namespace: {OTHER_PID_NAMESPACE}")
        return self._memory.handle()

    def close(self) -> None:
        """Give up the manager's hold."""
        if self._memory is not None:
            self._memory.close()

    def _is_out_of_reach(self, pid: int) -> bool:
        return self._memory is not None and self._memory.backend == "cuda_ipc" and _is_in_other_pid_namespace(pid)


def open_pool(
    settings: ManagerSettings,
    load: Callable[[int], CudaDriver] = load_cuda_driver,
    self_test: Callable[[CudaIpcHandle, int], str | None] = what_fails,
) -> SharedPool:
    """Choose the pool's memory and take it.

    Args:
        settings: of the process.
        load: gives the driver of a GPU, or raises ConfigurationError.
        self_test: why the pool cannot be opened by CUDA IPC here, or None.

    Raises:
        ConfigurationError: it cannot be had; the message begins with the setting.
    """
    driver, obstacle = None, None
    if settings.device != "cpu" and settings.pool_memory != "memfd":
        try:
            driver = load(settings.gpu)
        except ConfigurationError as error:
            obstacle = str(error)
    choice = choose_backend(settings.device, settings.pool_memory, obstacle)
    pool = _take(choice, driver, settings, self_test)
    _log.info("took the pool's memory", backend=pool.backend, size=pool.size, reason=choice.why)
    return pool


def _take(
    choice: Choice,
    driver: CudaDriver | None,
    settings: ManagerSettings,
    self_test: Callable[[CudaIpcHandle, int], str | None],
) -> SharedPool:
    size = int(settings.pool_size)
    if driver is None:
        return SharedPool(MemfdPool(size, preallocate=settings.preallocate))
    if choice.backend == "cuda_vmm":
        return SharedPool(CudaVmmPool(driver, size))
    memory = CudaIpcPool(driver, size)
    if not choice.may_change:
        return SharedPool(memory)
    try:
        failure = self_test(memory.handle(), settings.gpu)
    except BaseException:
        memory.free()
        raise

    def make_other() -> CudaVmmPool:
        memory.free()
        return CudaVmmPool(driver, memory.size)

    if failure is None:
        return SharedPool(memory, make_other)
    _log.warning("CUDA IPC does not work here, taking CUDA VMM", reason=failure)
    return SharedPool(make_other())


def _is_in_other_pid_namespace(pid: int) -> bool:
    if pid == 0:
        return True
    try:
        return os.readlink(f"/proc/{pid}/ns/pid") != os.readlink("/proc/self/ns/pid")  # noqa: PTH115 (no path is meant)
    except OSError:
        return False  # it has ended, or is not ours to look at
