"""A GPU's memory, played by anonymous files: allocations live while somebody has them, and addresses map them."""

import ctypes
import mmap
import os
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_NOTHING = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


@dataclass(eq=False)
class Allocation:
    """Device memory. It lives while somebody has it."""

    size: int
    file: int
    exporter: str
    """The process that made it."""
    pid_namespace: str
    held: Counter[tuple[str, str]] = field(default_factory=Counter)
    """How often each (process, kind of hold) has it."""

    def is_alive(self) -> bool:
        return self.held.total() > 0 or self._num_descriptors() > 1

    def _num_descriptors(self) -> int:
        mine, count = os.fstat(self.file), 0
        for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208 (names are all that is wanted)
            try:
                found = os.stat(int(entry))  # noqa: PTH116 (it is a descriptor and not a path)
            except OSError:
                continue
            count += (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino)
        return count


class FakeGpu:
    """The device, as all its processes share it.

    Attributes:
        mps: whether it is under MPS.
        misuses: every call that CUDA forbids, as text.
    """

    def __init__(self, total: int = 1 << 28, uuid: str = "GPU-fake-0") -> None:
        self.total = total
        self.uuid = uuid
        self.mps = False
        self.misuses: list[str] = []
        self.allocations: list[Allocation] = []
        self.handles: dict[bytes, Allocation] = {}

    def used(self) -> int:
        return sum(allocation.size for allocation in self.allocations if allocation.is_alive())

    def close(self) -> None:
        for allocation in self.allocations:
            os.close(allocation.file)


def map_file(file: int, size: int, address: int | None = None) -> int:
    """Its bytes, at an address of the kernel's choice or at this one."""
    flags = mmap.MAP_SHARED | (_MAP_FIXED if address else 0)
    return _checked(_LIBC.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, 0))


def reserve(size: int, address: int | None = None) -> int:
    """Addresses that nobody can access; what was mapped at `address` is gone."""
    return _checked(_LIBC.mmap(address, size, 0, _NOTHING | (_MAP_FIXED if address else 0), -1, 0))


def unmap(address: int, size: int) -> None:
    _LIBC.munmap(address, size)


def view(address: int, size: int, owner: object) -> np.ndarray:
    """Memory as an array that keeps `owner` as long as anybody looks at it."""
    return np.asarray(_Interface(address, size, owner))


class _Interface:
    def __init__(self, address: int, size: int, owner: object) -> None:
        self.owner = owner
        self.__array_interface__ = {"version": 3, "shape": (size,), "typestr": "|u1", "data": (address, False)}


def _checked(address: int | None) -> int:
    if address is None or address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return address
