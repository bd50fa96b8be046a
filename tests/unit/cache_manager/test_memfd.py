import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from cache_manager.memory.memfd import MemfdPool, open_memfd
from pagekeeper.common.errors import ConfigurationError

SIZE = 1 << 16


@pytest.fixture
def pool() -> Iterator[MemfdPool]:
    memory = MemfdPool(SIZE, preallocate=True)
    yield memory
    memory.close()


def test_two_mappings_see_the_same_bytes(pool: MemfdPool) -> None:
    (descriptor,) = pool.descriptors()
    with closing(open_memfd(descriptor, SIZE)) as one, closing(open_memfd(descriptor, SIZE)) as two:
        memoryview(one.array())[SIZE - 4 :] = b"last"
        assert memoryview(two.array())[SIZE - 4 :] == b"last"
        assert two.size == SIZE


def test_its_size_is_final(pool: MemfdPool) -> None:
    (descriptor,) = pool.descriptors()
    for size in (SIZE - 1, SIZE + 1, 0):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)


def test_a_mapping_outlives_the_managers_descriptor() -> None:
    memory = MemfdPool(SIZE, preallocate=False)
    with closing(open_memfd(memory.descriptors()[0], SIZE)) as mapped:
        memory.close()
        view = memoryview(mapped.array())
        view[:2] = b"ok"
        assert view[:2] == b"ok"


def test_a_view_keeps_the_pool_mapped_after_it_was_closed(pool: MemfdPool) -> None:
    def is_mapped() -> bool:
        return "memfd:pagekeeper-pool" in Path("/proc/self/maps").read_text()

    mapped = open_memfd(pool.descriptors()[0], SIZE)
    view = memoryview(mapped.array())
    mapped.close()
    view[:2] = b"ok"
    assert is_mapped()
    del view, mapped
    assert not is_mapped()


def test_memory_is_taken_at_start_or_when_it_is_written() -> None:
    for preallocate in (True, False):
        memory = MemfdPool(SIZE, preallocate=preallocate)
        assert (os.fstat(memory.descriptors()[0]).st_blocks > 0) is preallocate
        memory.close()


def test_too_little_memory_is_an_error_that_names_the_setting() -> None:
    with pytest.raises(ConfigurationError, match=r"^pool_size: 1152921504606846976 bytes are wanted"):
        MemfdPool(1 << 60, preallocate=True)


def test_a_failed_start_leaks_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(ConfigurationError, match=r"^pool_size: cannot take 65536 bytes of memory: Cannot allocate"):
        MemfdPool(SIZE, preallocate=True)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_another_size_than_announced_is_not_mapped(pool: MemfdPool) -> None:
    with pytest.raises(ConfigurationError, match=f"has {SIZE} bytes, not the {2 * SIZE} announced"):
        open_memfd(pool.descriptors()[0], 2 * SIZE)


def test_memory_that_could_shrink_is_not_mapped() -> None:
    descriptor = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, mmap.PAGESIZE)
    with pytest.raises(ConfigurationError, match="not sealed"):
        open_memfd(descriptor, mmap.PAGESIZE)
    os.close(descriptor)


def test_a_descriptor_that_is_no_memfd_is_not_mapped() -> None:
    reader, writer = os.pipe()
    with pytest.raises(ConfigurationError, match="no memfd"):
        open_memfd(reader, mmap.PAGESIZE)
    os.close(reader)
    os.close(writer)
