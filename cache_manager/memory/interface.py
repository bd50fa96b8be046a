"""What every kind of pool memory offers: to the manager that owns it, and to a runner that has mapped it."""

from typing import Protocol


class PoolMemory(Protocol):
    """The manager's end: the bytes of the pool, in a form that other processes can map."""

    @property
    def backend(self) -> str:
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

    def descriptors(self) -> list[int]:
        """File descriptors that a runner needs to map it; they travel over the hand-over socket. The memory's own."""
        ...

    def close(self) -> None:
        """Give up the manager's own hold. The memory lives on as long as a runner has it mapped."""
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
        """Give up this process's hold. A view that is still in use keeps the pool mapped until it is gone."""
        ...
