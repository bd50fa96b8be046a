"""A pool of the driver's virtual memory management: memory apart from addresses, shared by file descriptors.

`cuMemCreate`, export to a POSIX descriptor, SCM_RIGHTS, `cuMemMap` (CUDA C++ Programming Guide, Virtual Memory
Management). Descriptors cross PID namespaces, and the memory lives while any process has a descriptor or a mapping of
it. The memory can grow at its end, since its addresses are reserved beforehand; the policy does not carve the added
part into blocks yet.
"""

import contextlib
import os

from cache_manager.memory.cuda_driver import CudaDriver
from cache_manager.memory.cuda_pool import (
    MappedCudaPool,
    NullBlockPattern,
    check_device,
    check_pattern,
    check_same_gpu,
    errors_as_configuration,
    refuse_mps,
)
from cache_manager.memory.interface import Backend, CudaVmmHandle
from pagekeeper.common.errors import ConfigurationError

MAX_CHUNKS = 4
"""The hand-over socket carries so many descriptors: a pool can grow three times."""


class CudaVmmPool:
    """The manager's end.

    Raises:
        ConfigurationError: the device has less memory, is under MPS, or refuses.
    """

    backend: Backend = "cuda_vmm"
    outlived_by_device_work = True

    def __init__(self, driver: CudaDriver, size: int, max_size: int | None = None) -> None:
        """Create at least `size` bytes, and reserve addresses for `grow` up to `max_size` or else all the GPU has.

        Sizes are rounded up to the driver's granularity, 2 MiB on common GPUs.
        """
        self._driver = driver
        self._pattern = NullBlockPattern(driver)
        self._chunk_sizes: list[int] = []
        self._descriptors: list[int] = []
        with errors_as_configuration("make the pool by CUDA VMM", size), contextlib.ExitStack() as undo:
            check_device(driver, size)
            self._granularity = driver.granularity()
            self._max_size = self._rounded(max(size, max_size or driver.memory_info()[1]))
            self._address = driver.reserve(self._max_size)
            undo.callback(driver.unreserve, self._address, self._max_size)
            undo.enter_context(self._added(size))
            self._release = undo.pop_all()

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(self._chunk_sizes)

    def grow(self, num_bytes: int) -> None:
        """Add at least `num_bytes` at the end. Runners map them from their next hand-over on.

        The policy does not carve them into blocks yet, so the cache manager grows no pool.

        Raises:
            ConfigurationError: the device has less memory, or the pool has reached what it may grow to. Nothing was
                changed.
        """
        wanted = self.size + self._rounded(num_bytes)
        if wanted > self._max_size:
            raise ConfigurationError(f"pool_size: the pool may grow to {self._max_size} bytes, {wanted} are wanted")
        if len(self._chunk_sizes) == MAX_CHUNKS:
            raise ConfigurationError(f"pool_size: the pool has grown {MAX_CHUNKS - 1} times, which is the most")
        with errors_as_configuration("grow the pool", num_bytes):
            check_device(self._driver, num_bytes)
            self._release.enter_context(self._added(num_bytes))

    def handle(self) -> CudaVmmHandle:
        """What the descriptors are of, with the null block marked anew."""
        return CudaVmmHandle(tuple(self._chunk_sizes), self._driver.uuid, self._pattern.write(self._address))

    def descriptors(self) -> list[int]:
        """One for each chunk."""
        return list(self._descriptors)

    def close(self) -> None:
        """Give everything up; the memory lives as long as a runner has it mapped. Idempotent."""
        self._descriptors.clear()
        self._release.close()

    def _added(self, num_bytes: int) -> contextlib.ExitStack:
        """Add a chunk; the stack takes it away again."""
        driver, size = self._driver, self._rounded(num_bytes)
        address = self._address + self.size
        with contextlib.ExitStack() as undo:
            memory = driver.create(size)
            undo.callback(driver.release, memory)
            driver.map(address, size, memory)
            undo.callback(driver.unmap, address, size)
            driver.allow_access(address, size)
            descriptor = driver.export_descriptor(memory)
            undo.callback(os.close, descriptor)
            self._chunk_sizes.append(size)
            self._descriptors.append(descriptor)
            return undo.pop_all()

    def _rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self._granularity) * self._granularity


def open_cuda_vmm(driver: CudaDriver, handle: CudaVmmHandle, descriptors: list[int]) -> MappedCudaPool:
    """Map a manager's pool, at the runner's end. The caller keeps the descriptors, one for each chunk.

    Raises:
        ConfigurationError: the pool cannot be mapped here; the message names the cause.
    """
    size = sum(handle.chunk_sizes)
    with errors_as_configuration("map the pool by CUDA VMM", size), contextlib.ExitStack() as undo:
        refuse_mps(driver)
        check_same_gpu(driver, handle.device_uuid)
        address = driver.reserve(size)
        undo.callback(driver.unreserve, address, size)
        end = address
        for descriptor, chunk_size in zip(descriptors, handle.chunk_sizes, strict=True):
            memory = driver.import_descriptor(descriptor)
            undo.callback(driver.release, memory)
            driver.map(end, chunk_size, memory)
            undo.callback(driver.unmap, end, chunk_size)
            end += chunk_size
        driver.allow_access(address, size)
        check_pattern(driver, address, handle.pattern)
        undo.callback(driver.synchronize)
        return MappedCudaPool(driver, address, size, undo.pop_all())
