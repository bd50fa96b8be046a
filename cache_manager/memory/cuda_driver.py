"""What Pagekeeper needs of CUDA to share memory between processes, and nothing else.

Every call of the pools goes through `CudaDriver`, so that their sequencing and every error path can be tested without
a device. cupy_driver.py is the real one.
"""

from enum import IntEnum
from typing import Protocol

from cache_manager.memory.interface import PoolArray
from pagekeeper.common.errors import PagekeeperError


class CudaStatus(IntEnum):
    """Error codes whose cause is known; driver and runtime API number them alike (CUDA Driver API, CUresult)."""

    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    INVALID_CONTEXT = 201
    INVALID_HANDLE = 400
    NOT_PERMITTED = 800
    NOT_SUPPORTED = 801


class CudaError(PagekeeperError):
    """A call of the CUDA driver failed.

    Attributes:
        call: the function, as CUDA names it.
        code: CUresult or cudaError_t.
        name: of the code, as CUDA names it.
    """

    def __init__(self, call: str, code: int, name: str, description: str) -> None:
        super().__init__(f"{call}: {name} ({description})")
        self.call = call
        self.code = code
        self.name = name


class CudaDriver(Protocol):
    """CUDA on one GPU, for one process. Addresses are this process's, sizes are bytes.

    Every method may raise CudaError, and may be called on any thread.
    """

    @property
    def uuid(self) -> str:
        """The GPU in the form "GPU-...", the same for every process."""
        ...

    def is_under_mps(self) -> bool:
        """Whether processes share one context on this GPU, by the multi-process service."""
        ...

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of the GPU."""
        ...

    def write(self, address: int, data: bytes) -> None:
        """Write a few bytes of device memory; they are there for every process when this returns."""
        ...

    def read(self, address: int, size: int) -> bytes:
        """Read a few bytes of device memory."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has done all that this process has asked of it."""
        ...

    def array(self, address: int, size: int, owner: object) -> PoolArray:
        """Device memory as an array, without a copy. It and whatever is made of it keep a reference to `owner`."""
        ...

    # CUDA IPC

    def allocate(self, size: int) -> int:
        """An address for cudaMalloc's memory; give it back to `free`."""
        ...

    def free(self, address: int) -> None:
        """Undo `allocate`. Processes that have it open keep the memory."""
        ...

    def export_handle(self, address: int) -> bytes:
        """The IPC handle of the allocation that holds `address`."""
        ...

    def open_handle(self, handle: bytes) -> int:
        """Map another process's allocation: its base here. A second call gives the same and counts."""
        ...

    def close_handle(self, address: int) -> None:
        """Undo one `open_handle`."""
        ...

    def extent(self, address: int) -> int:
        """Bytes from `address` to the end of its allocation."""
        ...

    # Virtual memory management

    def granularity(self) -> int:
        """What sizes and addresses of the following are multiples of."""
        ...

    def reserve(self, size: int) -> int:
        """An address range with nothing behind it; give it back to `unreserve`."""
        ...

    def unreserve(self, address: int, size: int) -> None:
        """Undo `reserve`. Nothing may be mapped there any more."""
        ...

    def create(self, size: int) -> int:
        """A handle for memory without an address; give it back to `release`."""
        ...

    def release(self, handle: int) -> None:
        """Give a handle up. The memory lives as long as a handle, a mapping or a descriptor in any process does."""
        ...

    def export_descriptor(self, handle: int) -> int:
        """A file descriptor for the memory, the caller's to close."""
        ...

    def import_descriptor(self, descriptor: int) -> int:
        """A handle of this process for another one's memory; give it back to `release`. The descriptor stays open."""
        ...

    def map(self, address: int, size: int, handle: int) -> None:
        """Put the first `size` bytes of memory at a reserved address. Nobody can access them yet."""
        ...

    def allow_access(self, address: int, size: int) -> None:
        """Let this GPU read and write what is mapped there."""
        ...

    def unmap(self, address: int, size: int) -> None:
        """Undo `map`."""
        ...
