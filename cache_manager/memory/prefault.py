"""Entering the pages of a mapping into the page tables before they are used.

The first touch of a page costs a fault: 0.5 s for each GiB. A runner that takes over streams reads the blocks of all of
them in its first step. (Two Zen 3 cores; in one go, as here, it is 0.1 s.)
"""

import ctypes
import mmap
import threading

_MADV_POPULATE_WRITE = 23  # linux/mman.h, since Linux 5.14
_SLICE_BYTES = 32 << 20


class Prefault:
    """Does so on a thread of its own, for a mapping that is writable and shared.

    Args:
        mapping: must not be closed between `start` and `stop`.
    """

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefault", daemon=True)

    def start(self) -> None:
        """Begin; it ends by itself."""
        self._thread.start()

    def stop(self) -> None:
        """End it, within some milliseconds. Idempotent."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        # Not `mmap.madvise`: it keeps the interpreter's lock, and every other thread would stand still.
        madvise = ctypes.CDLL(None).madvise
        size = len(self._mapping)
        view = ctypes.c_char.from_buffer(self._mapping)
        address = ctypes.addressof(view)
        for start in range(0, size, _SLICE_BYTES):
            length = min(_SLICE_BYTES, size - start)
            failed = madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(length), _MADV_POPULATE_WRITE)
            if failed or self._stopped.is_set():
                return  # an older kernel: pages are entered when they are touched
