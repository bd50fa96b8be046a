"""A pool that is one raw cudaMalloc, opened by runners by its IPC handle.

Rules of CUDA IPC (CUDA C++ Programming Guide, Interprocess Communication): the handle is of the whole allocation and
opening gives its base; the exporting process cannot open its own; processes share a PID namespace; a process has one
mapping of an allocation, and opening again only counts; an allocation that others have open must not be freed. When the
manager's process ends, mappings stay and keep the memory, and nobody can open it any more.
"""

import contextlib

from cache_manager.memory.cuda_driver import CudaDriver, CudaError, CudaStatus
from cache_manager.memory.cuda_pool import (
    MappedCudaPool,
    NullBlockPattern,
    check_device,
    check_pattern,
    check_same_gpu,
    errors_as_configuration,
    refuse_mps,
)
from cache_manager.memory.interface import Backend, CudaIpcHandle
from pagekeeper.common.errors import ConfigurationError

_UNIT = 2 << 20
"""Smaller allocations share a piece of memory with others, which would be exported with them."""

OTHER_PID_NAMESPACE = (
    "CUDA IPC does not cross PID namespaces; let both containers share one (pid: service:NAME in compose), or start "
    "the cache manager with --pool-memory cuda_vmm"
)

_CAUSES: dict[int, str] = {
    CudaStatus.INVALID_CONTEXT: f"the cache manager is in another PID namespace: {OTHER_PID_NAMESPACE}",
    CudaStatus.INVALID_VALUE: "the pool is on a GPU that this process does not see, or its cache manager has ended; "
    "give both the same GPU",
    CudaStatus.INVALID_HANDLE: "the handle is of no living allocation; restart the cache manager",
    CudaStatus.OUT_OF_MEMORY: "this process has no room for the mapping; free device memory",
    CudaStatus.NOT_PERMITTED: "the container or the driver forbids CUDA IPC; start the cache manager with "
    "--pool-memory cuda_vmm",
    CudaStatus.NOT_SUPPORTED: "this GPU or platform has no CUDA IPC; start the cache manager with "
    "--pool-memory cuda_vmm",
}


class CudaIpcPool:
    """The manager's end.

    Raises:
        ConfigurationError: the device has less memory, is under MPS, or refuses.
    """

    backend: Backend = "cuda_ipc"
    outlived_by_device_work = True

    def __init__(self, driver: CudaDriver, size: int) -> None:
        """Allocate at least `size` bytes: whole units of 2 MiB."""
        self.size = -(-size // _UNIT) * _UNIT
        self._driver = driver
        self._pattern = NullBlockPattern(driver)
        with errors_as_configuration("make the pool by CUDA IPC", self.size), contextlib.ExitStack() as undo:
            check_device(driver, self.size)
            self._address = driver.allocate(self.size)
            undo.callback(driver.free, self._address)
            self._handle = driver.export_handle(self._address)
            self._free = undo.pop_all()

    def handle(self) -> CudaIpcHandle:
        """The handle, with the null block marked anew."""
        # A raw allocation of whole units begins at its base.
        return CudaIpcHandle(self._handle, 0, self.size, self._driver.uuid, self._pattern.write(self._address))

    def descriptors(self) -> list[int]:
        """None: the handle is all."""
        return []

    def close(self) -> None:
        """Leave the memory to the end of the process: runners may have it open, and to free it then is undefined."""

    def free(self) -> None:
        """Free the memory, which nobody may have open. Idempotent."""
        self._free.close()


def open_cuda_ipc(driver: CudaDriver, handle: CudaIpcHandle) -> MappedCudaPool:
    """Map a manager's pool, at the runner's end.

    Raises:
        ConfigurationError: it cannot be mapped here; the message names the cause and what to do.
    """
    with errors_as_configuration("open the pool by CUDA IPC", handle.size), contextlib.ExitStack() as undo:
        refuse_mps(driver)
        check_same_gpu(driver, handle.device_uuid)
        base = _open(driver, handle.handle)
        undo.callback(driver.close_handle, base)
        extent = driver.extent(base)
        if handle.offset + handle.size > extent:
            raise ConfigurationError(
                f"pool_memory: the pool should be {handle.size} bytes at {handle.offset}, but the allocation has "
                f"{extent}; run the same version of cache manager and runner"
            )
        check_pattern(driver, base + handle.offset, handle.pattern)
        undo.callback(driver.synchronize)
        return MappedCudaPool(driver, base + handle.offset, handle.size, undo.pop_all())


def _open(driver: CudaDriver, handle: bytes) -> int:
    try:
        return driver.open_handle(handle)
    except CudaError as error:
        if cause := _CAUSES.get(error.code):
            raise ConfigurationError(f"pool_memory: {cause} ({error})") from error
        raise
