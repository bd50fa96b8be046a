"""Pool memory of the CPU: an anonymous, sealed file that lives as long as somebody has it open or mapped.

Nothing is left behind by kill -9, and nobody can unlink it by accident, unlike a name in /dev/shm.
"""

import contextlib
import fcntl
import mmap
import os
from pathlib import Path

from cache_manager.memory.interface import Backend, MemfdHandle, PoolArray
from pagekeeper.common.errors import ConfigurationError

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""The size is final, and so is that it is final: a mapping of it can never raise SIGBUS. (memfd_create(2))"""


class MemfdPool:
    """The manager's end. Close it to give up the descriptor.

    Raises:
        ConfigurationError: the machine does not have that much memory to give.
    """

    backend: Backend = "memfd"
    outlived_by_device_work = False

    def __init__(self, size: int, *, preallocate: bool) -> None:
        """Create the memory.

        Args:
            size: bytes.
            preallocate: take all of it now, so that too little memory is an error at start and not a killed process
                later. Without, a page is taken when it is first written.
        """
        if preallocate and size > (available := _available_bytes()):
            raise ConfigurationError(f"pool_size: {size} bytes are wanted, {available} bytes of memory are available")
        self.size = size
        self._fd = os.memfd_create("pagekeeper-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, size)
            if preallocate:
                os.posix_fallocate(self._fd, 0, size)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            os.close(self._fd)
            raise ConfigurationError(f"pool_size: cannot take {size} bytes of memory: {error.strerror}") from error

    def handle(self) -> MemfdHandle:
        """Its size."""
        return MemfdHandle(self.size)

    def descriptors(self) -> list[int]:
        """The file itself."""
        return [self._fd]

    def close(self) -> None:
        """Close the file; runners' mappings stay. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _available_bytes() -> int:
    """What can be taken without swapping or reaching the container's limit.

    The kernel does not say so itself: asked for more, fallocate(2) goes on until the out-of-memory killer strikes.
    """
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (most := limit.read_text().strip()) != "max":
        available = min(available, int(most) - int(used.read_text()))
    return available


class MappedMemfd:
    """The runner's end, around a mapping that is shared and writable."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self.size = len(mapping)

    def array(self) -> PoolArray:
        """The bytes, as a numpy array."""
        import numpy as np  # a manager, which maps nothing, does without it

        return np.frombuffer(self._mapping, np.uint8)

    def close(self) -> None:
        """Unmap the file, at once or with its last view. Idempotent."""
        with contextlib.suppress(BufferError):
            self._mapping.close()


def open_memfd(fd: int, expected_size: int) -> MappedMemfd:
    """Map a pool that a manager handed over. The caller keeps `fd`, and may close it.

    Raises:
        ConfigurationError: the file is not sealed against a change of its size, or has another size. Mapping it
            could then end in a SIGBUS.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ConfigurationError(f"the descriptor handed over is no memfd: {error.strerror}") from error
    if seals & _SEALS != _SEALS:
        raise ConfigurationError("the memory handed over is not sealed against a change of its size")
    size = os.fstat(fd).st_size
    if size != expected_size:
        raise ConfigurationError(f"the memory handed over has {size} bytes, not the {expected_size} announced")
    return MappedMemfd(mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE))
