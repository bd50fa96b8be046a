"""What every kind of pool memory offers to the manager that owns it."""

from typing import Protocol


class PoolMemory(Protocol):
    """The bytes of the pool, in a form that other processes can map."""

    @property
    def backend(self) -> str:
        """As statistics name it, and the field of `MemoryHandle` that describes it to runners."""
        ...

    @property
    def size(self) -> int:
        """Bytes."""
        ...

    def descriptors(self) -> list[int]:
        """File descriptors that a runner needs to map it; they travel over the hand-over socket. The memory's own."""
        ...

    def close(self) -> None:
        """Give up the manager's own hold. The memory lives on as long as a runner has it mapped."""
        ...
