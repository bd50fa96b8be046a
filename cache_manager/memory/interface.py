"""What every kind of pool memory offers: to the manager that owns it, and to a runner that has mapped it."""

from dataclasses import dataclass
from typing import Literal, Protocol

Backend = Literal["memfd", "cuda_ipc", "cuda_vmm"]
"""Of the CPU; of a GPU by a CUDA IPC handle; of a GPU by a descriptor of the driver's virtual memory management."""


@dataclass(frozen=True)
class MemfdHandle:
    """How a runner maps a memfd; the descriptor travels over the hand-over socket."""

    size: int


@dataclass(frozen=True)
class CudaIpcHandle:
    """How a runner opens an allocation that the manager made with cudaMalloc."""

    handle: bytes
    """cudaIpcMemHandle_t. Opening it gives the allocation's base."""
    offset: int
    """Of the pool in the allocation, in bytes."""
    size: int
    device_uuid: str
    pattern: bytes
    """What the null block begins with."""


@dataclass(frozen=True)
class CudaVmmHandle:
    """How a runner maps allocations of cuMemCreate; their descriptors travel over the hand-over socket, in order."""

    chunk_sizes: tuple[int, ...]
    """In bytes; the pool is these allocations one after the other."""
    device_uuid: str
    pattern: bytes
    """What the null block begins with."""


MemoryHandle = MemfdHandle | CudaIpcHandle | CudaVmmHandle


class PoolMemory(Protocol):
    """The manager's end: the bytes of the pool, in a form that other processes can map."""

    @property
    def backend(self) -> Backend:
        """As statistics name it, and the field of `MemoryHandle` that describes it to runners."""
        ...

    @property
    def size(self) -> int:
        """Bytes."""
        ...

    @property
    def outlived_by_device_work(self) -> bool:
        """Whether work that a runner has queued on a device may still write it after the runner's process has ended.

        Then the blocks that a dead runner could write stay QUARANTINED for a while.
        """
        ...

    def handle(self) -> MemoryHandle:
        """What a runner that attaches now is told. Of device memory, marks the null block for its check."""
        ...

    def descriptors(self) -> list[int]:
        """File descriptors that a runner needs to map it; they travel over the hand-over socket. The memory's own."""
        ...

    def close(self) -> None:
        """Give up the manager's own hold, as the process ends. Idempotent.

        The memory lives on as long as a runner has it mapped. It need not be free before the process has ended.
        """
        ...


class PoolArray(Protocol):
    """An array of one axis and of uint8, to be viewed by way of DLPack (dmlc.github.io/dlpack)."""

    def __dlpack__(self, *, stream: int | None = None) -> object: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


class MappedPool(Protocol):
    """The runner's end: the pool's bytes in this process, shared and writable."""

    @property
    def size(self) -> int:
        """Bytes."""
        ...

    def array(self) -> PoolArray:
        """The bytes, without a copy. What is made of it views the pool and keeps it mapped."""
        ...

    def close(self) -> None:
        """Unmap the pool. Idempotent. Memory is never unmapped under a view that is still in use.

        Raises:
            BugError: the memory is a device's and a view is in use; nothing was changed. A memfd is unmapped with its
                last view instead.
        """
        ...
