"""Pools of every kind, made by one played process and mapped by others."""

from collections.abc import Callable

import numpy as np

from cache_manager.memory.cuda_ipc import CudaIpcPool
from cache_manager.memory.cuda_vmm import CudaVmmPool
from cache_manager.memory.interface import MappedPool, PoolMemory
from cache_manager.memory.mapping import map_pool
from cache_manager.memory.memfd import MemfdPool
from tests.fakes.cuda_driver import GRANULARITY, FakeCudaDriver
from tests.fakes.cuda_memory import FakeGpu

MAX_SIZE = 16 * GRANULARITY
SIZE = 4 * GRANULARITY
BACKENDS = ("memfd", "cuda_ipc", "cuda_vmm")
CUDA_BACKENDS = BACKENDS[1:]


class Host:
    """A machine with one GPU: a cache manager on it and any number of runners."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.gpu = FakeGpu()
        self.manager = FakeCudaDriver(self.gpu)

    def make(self, size: int = SIZE) -> PoolMemory:
        makers: dict[str, Callable[[], PoolMemory]] = {
            "memfd": lambda: MemfdPool(size, preallocate=False),
            "cuda_ipc": lambda: CudaIpcPool(self.manager, size),
            "cuda_vmm": lambda: CudaVmmPool(self.manager, size, MAX_SIZE),
        }
        return makers[self.backend]()

    def runner(self, name: str = "runner") -> FakeCudaDriver | None:
        return None if self.backend == "memfd" else FakeCudaDriver(self.gpu, name)

    def end_manager(self, memory: PoolMemory) -> None:
        """In good order."""
        memory.close()
        self.manager.end()

    def open(self, memory: PoolMemory, driver: FakeCudaDriver | None) -> MappedPool:
        return map_pool(memory.handle(), memory.descriptors(), driver)


def bytes_of(mapped: MappedPool) -> np.ndarray:
    """Every byte, to be read and written in place, by way of DLPack as torch does it."""
    return np.from_dlpack(mapped.array())
