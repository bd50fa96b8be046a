"""A `CudaDriver` without a GPU that keeps CUDA's rules and remembers who broke them.

Addresses, bytes and descriptors are real ones, of anonymous files (cuda_memory.py). Processes are played: each has a
driver of its own on the same `FakeGpu`.
"""

import ctypes
import functools
import itertools
import os
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from cache_manager.memory.cuda_driver import CudaError, CudaStatus
from cache_manager.memory.interface import PoolArray
from tests.fakes import cuda_memory as memory
from tests.fakes.cuda_memory import Allocation, FakeGpu

GRANULARITY = 1 << 16
TOLD_TO_FAIL = 999

P = ParamSpec("P")
R = TypeVar("R")


def _call(method: Callable[Concatenate["FakeCudaDriver", P], R]) -> Callable[Concatenate["FakeCudaDriver", P], R]:
    """A call of the driver, which may be told to fail."""

    @functools.wraps(method)
    def wrapped(self: "FakeCudaDriver", *args: P.args, **kwargs: P.kwargs) -> R:
        self.calls.append(method.__name__)
        if len(self.calls) == self.fail_at:
            raise CudaError(method.__name__, TOLD_TO_FAIL, "CUDA_ERROR_UNKNOWN", "told to fail")
        if code := self.fail_with.get(method.__name__):
            raise _error(method.__name__, code)
        return method(self, *args, **kwargs)

    return wrapped


class FakeCudaDriver:
    """One process's driver.

    Attributes:
        calls: every call so far, by name.
        fail_at: the number, from 1, of the call that fails.
        fail_with: code by name of calls that always fail.
    """

    def __init__(self, gpu: FakeGpu, process: str = "manager", pid_namespace: str = "host") -> None:
        self.gpu = gpu
        self.process = process
        self.pid_namespace = pid_namespace
        self.calls: list[str] = []
        self.fail_at = 0
        self.fail_with: dict[str, int] = {}
        self._ids = itertools.count(1)
        self._raw: dict[int, Allocation] = {}
        self._opened: dict[int, list[Any]] = {}  # address: [allocation, how often]
        self._reserved: dict[int, int] = {}
        self._memory: dict[int, Allocation] = {}
        self._mapped: dict[int, tuple[Allocation, int]] = {}
        self._accessible: set[int] = set()

    @property
    def uuid(self) -> str:
        return self.gpu.uuid

    def leaks(self) -> list[str]:
        """What this process has not given back."""
        kinds = {
            "allocation": self._raw,
            "opened": self._opened,
            "reservation": self._reserved,
            "handle": self._memory,
            "mapping": self._mapped,
        }
        return [f"{kind} {hex(key)}" for kind, things in kinds.items() for key in things]

    def end(self) -> None:
        """The process dies: everything that it has is let go."""
        for allocation in self.gpu.allocations:
            for holder in [holder for holder in allocation.held if holder[0] == self.process]:
                del allocation.held[holder]

    @_call
    def is_under_mps(self) -> bool:
        return self.gpu.mps

    @_call
    def memory_info(self) -> tuple[int, int]:
        return self.gpu.total - self.gpu.used(), self.gpu.total

    @_call
    def write(self, address: int, data: bytes) -> None:
        self._check_accessible("write", address, len(data))
        ctypes.memmove(address, data, len(data))

    @_call
    def read(self, address: int, size: int) -> bytes:
        self._check_accessible("read", address, size)
        return ctypes.string_at(address, size)

    @_call
    def synchronize(self) -> None:
        pass

    @_call
    def array(self, address: int, size: int, owner: object) -> PoolArray:
        self._check_accessible("array", address, size)
        return memory.view(address, size, owner)

    @_call
    def allocate(self, size: int) -> int:
        allocation = self._new(size)
        address = memory.map_file(allocation.file, size)
        self._raw[address] = allocation
        self._hold(allocation, "raw")
        return address

    @_call
    def free(self, address: int) -> None:
        if address not in self._raw:
            raise self._misuse("free", "nothing is allocated there")
        allocation = self._raw.pop(address)
        if any(count for (_, kind), count in allocation.held.items() if kind == "opened"):
            self.gpu.misuses.append(f"{self.process}: free: another process has the memory open")
        memory.unmap(address, allocation.size)
        self._let_go(allocation, "raw")

    @_call
    def export_handle(self, address: int) -> bytes:
        for base, allocation in self._raw.items():
            if base <= address < base + allocation.size:
                handle = f"{self.gpu.uuid}:{self.gpu.allocations.index(allocation)}".encode().ljust(64, b"\0")
                self.gpu.handles[handle] = allocation
                return handle
        raise self._misuse("export_handle", "no raw allocation is there")

    @_call
    def open_handle(self, handle: bytes) -> int:
        allocation = self.gpu.handles.get(handle)
        if allocation is None or not allocation.held[(allocation.exporter, "raw")]:
            raise _error("open_handle", CudaStatus.INVALID_VALUE)  # another GPU's, or its exporter has ended
        if allocation.exporter == self.process:
            raise self._misuse("open_handle", "the exporter opens its own handle", CudaStatus.INVALID_CONTEXT)
        if allocation.pid_namespace != self.pid_namespace:
            raise _error("open_handle", CudaStatus.INVALID_CONTEXT)
        self._hold(allocation, "opened")
        for address, entry in self._opened.items():
            if entry[0] is allocation:
                entry[1] += 1
                return address
        address = memory.map_file(allocation.file, allocation.size)
        self._opened[address] = [allocation, 1]
        return address

    @_call
    def close_handle(self, address: int) -> None:
        if address not in self._opened:
            raise self._misuse("close_handle", "nothing is open there")
        entry = self._opened[address]
        entry[1] -= 1
        self._let_go(entry[0], "opened")
        if not entry[1]:
            del self._opened[address]
            memory.unmap(address, entry[0].size)

    @_call
    def extent(self, address: int) -> int:
        for base, size in self._ranges().items():
            if base <= address < base + size:
                return base + size - address
        raise self._misuse("extent", "no memory is there")

    @_call
    def granularity(self) -> int:
        return GRANULARITY

    @_call
    def reserve(self, size: int) -> int:
        if size <= 0 or size % GRANULARITY:
            raise self._misuse("reserve", f"{size} is not a multiple of the granularity")
        address = memory.reserve(size)
        self._reserved[address] = size
        return address

    @_call
    def unreserve(self, address: int, size: int) -> None:
        if self._reserved.get(address) != size:
            raise self._misuse("unreserve", "no such reservation")
        if any(address <= mapped < address + size for mapped in self._mapped):
            raise self._misuse("unreserve", "something is mapped there")
        del self._reserved[address]
        memory.unmap(address, size)

    @_call
    def create(self, size: int) -> int:
        if size <= 0 or size % GRANULARITY:
            raise self._misuse("create", f"{size} is not a multiple of the granularity")
        return self._handle_of(self._new(size))

    @_call
    def release(self, handle: int) -> None:
        if handle not in self._memory:
            raise self._misuse("release", "no such handle")
        self._let_go(self._memory.pop(handle), "handle")

    @_call
    def export_descriptor(self, handle: int) -> int:
        if handle not in self._memory:
            raise self._misuse("export_descriptor", "no such handle")
        return os.dup(self._memory[handle].file)

    @_call
    def import_descriptor(self, descriptor: int) -> int:
        found = os.fstat(descriptor)
        for allocation in self.gpu.allocations:
            own = os.fstat(allocation.file)
            if (own.st_dev, own.st_ino) == (found.st_dev, found.st_ino):
                return self._handle_of(allocation)
        raise _error("import_descriptor", CudaStatus.INVALID_VALUE)

    @_call
    def map(self, address: int, size: int, handle: int) -> None:
        if handle not in self._memory:
            raise self._misuse("map", "no such handle")
        allocation = self._memory[handle]
        around = [base for base, length in self._reserved.items() if base <= address <= base + length - size]
        if not around:
            raise self._misuse("map", "the addresses are not reserved")
        if any(address < base + length and base < address + size for base, (_, length) in self._mapped.items()):
            raise self._misuse("map", "something is mapped there")
        if (address - around[0]) % GRANULARITY or size % GRANULARITY or size > allocation.size:
            raise _error("map", CudaStatus.INVALID_VALUE)
        memory.map_file(allocation.file, size, address)
        self._mapped[address] = (allocation, size)
        self._hold(allocation, "mapping")

    @_call
    def allow_access(self, address: int, size: int) -> None:
        inside = {base: length for base, (_, length) in self._mapped.items() if address <= base < address + size}
        if sum(inside.values()) != size:
            raise self._misuse("allow_access", "the range is not mapped throughout")
        self._accessible |= set(inside)

    @_call
    def unmap(self, address: int, size: int) -> None:
        if address not in self._mapped or self._mapped[address][1] != size:
            raise self._misuse("unmap", "nothing of this size is mapped there")
        allocation, _ = self._mapped.pop(address)
        self._accessible.discard(address)
        memory.reserve(size, address)
        self._let_go(allocation, "mapping")

    def _new(self, size: int) -> Allocation:
        if size > self.gpu.total - self.gpu.used():
            raise _error("allocate", CudaStatus.OUT_OF_MEMORY)
        file = os.memfd_create("fake-device-memory")
        os.truncate(file, size)
        allocation = Allocation(size, file, self.process, self.pid_namespace)
        self.gpu.allocations.append(allocation)
        return allocation

    def _handle_of(self, allocation: Allocation) -> int:
        handle = next(self._ids)
        self._memory[handle] = allocation
        self._hold(allocation, "handle")
        return handle

    def _hold(self, allocation: Allocation, kind: str) -> None:
        allocation.held[(self.process, kind)] += 1

    def _let_go(self, allocation: Allocation, kind: str) -> None:
        allocation.held[(self.process, kind)] -= 1

    def _ranges(self) -> dict[int, int]:
        """Size of everything that can be accessed, by address."""
        ranges = {base: allocation.size for base, allocation in self._raw.items()}
        ranges |= {base: entry[0].size for base, entry in self._opened.items()}
        return ranges | {base: self._mapped[base][1] for base in self._accessible}

    def _check_accessible(self, call: str, address: int, size: int) -> None:
        position, end = address, address + size
        for base, length in sorted(self._ranges().items()):
            if base <= position < base + length:
                position = base + length
        if position < end:
            raise self._misuse(call, "illegal address")

    def _misuse(self, call: str, what: str, status: CudaStatus = CudaStatus.INVALID_VALUE) -> CudaError:
        self.gpu.misuses.append(f"{self.process}: {call}: {what}")
        return _error(call, status)


def _error(call: str, code: int) -> CudaError:
    names = {status.value: status.name for status in CudaStatus}
    return CudaError(call, code, f"CUDA_ERROR_{names.get(code, code)}", "as CUDA says it")
