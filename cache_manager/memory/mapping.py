"""The runner's way to a pool of any kind."""

from cache_manager.memory.cuda_driver import CudaDriver
from cache_manager.memory.cuda_ipc import open_cuda_ipc
from cache_manager.memory.cuda_vmm import open_cuda_vmm
from cache_manager.memory.interface import CudaIpcHandle, CudaVmmHandle, MappedPool, MemfdHandle, MemoryHandle
from cache_manager.memory.memfd import open_memfd
from pagekeeper.common.errors import ConfigurationError


class StaleDescriptors(Exception):
    """The pool was given other memory after this runner had received its descriptors: it shakes hands again."""


def map_pool(handle: MemoryHandle, descriptors: list[int], cuda: CudaDriver | None) -> MappedPool:
    """Map the pool that a manager described. The caller keeps the descriptors, and may close them.

    Args:
        handle: what it told this runner when it attached.
        descriptors: what it handed over before.
        cuda: of the GPU that this runner computes on; None if that is the CPU.

    Raises:
        StaleDescriptors: they are not of this handle.
        ConfigurationError: the pool cannot be mapped here; the message names the cause and what to do.
    """
    num_expected = _num_descriptors(handle)
    if len(descriptors) != num_expected:
        raise StaleDescriptors(f"{len(descriptors)} descriptors were handed over, the pool has {num_expected}")
    if isinstance(handle, MemfdHandle):
        if cuda is not None:
            raise ConfigurationError(
                "device: this runner computes on a GPU and the pool is in the CPU's memory; give the cache manager and "
                "the runner the same device"
            )
        return open_memfd(descriptors[0], handle.size)
    if cuda is None:
        raise ConfigurationError(
            "device: this runner computes on the CPU and the pool is in a GPU's memory; give the cache manager and the "
            "runner the same device"
        )
    if isinstance(handle, CudaIpcHandle):
        return open_cuda_ipc(cuda, handle)
    return open_cuda_vmm(cuda, handle, descriptors)


def _num_descriptors(handle: MemoryHandle) -> int:
    match handle:
        case MemfdHandle():
            return 1
        case CudaIpcHandle():
            return 0
        case CudaVmmHandle():
            return len(handle.chunk_sizes)
