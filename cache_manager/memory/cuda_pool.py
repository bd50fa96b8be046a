"""What CUDA IPC and VMM pools have in common, at the manager's and at the runner's end."""

import contextlib
import gc
import secrets
import weakref
from collections.abc import Iterator

from cache_manager.memory.cuda_driver import CudaDriver, CudaError, CudaStatus
from cache_manager.memory.interface import PoolArray
from pagekeeper.common.errors import BugError, ConfigurationError

_PATTERN_BYTES = 16


class NullBlockPattern:
    """Bytes at the start of the null block by which a runner knows that it has mapped this pool and no other.

    No kernel ever changes that block. The bytes are one pool's alone, so memory of an earlier pool cannot pass, and the
    same for each of its runners, so two that attach at once do not disturb each other.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._bytes = secrets.token_bytes(_PATTERN_BYTES)

    def write(self, address: int) -> bytes:
        """Write it anew; returns the bytes."""
        self._driver.write(address, self._bytes)
        return self._bytes


class MappedCudaPool:
    """The runner's end of device memory.

    Args:
        driver: of the GPU.
        address: of the pool in this process.
        size: bytes.
        unmap: what gives the address up again.
    """

    def __init__(self, driver: CudaDriver, address: int, size: int, unmap: contextlib.ExitStack) -> None:
        self.size = size
        self._driver = driver
        self._address = address
        self._unmap = unmap
        self._views: weakref.ref[_Views] | None = None
        self._closed = False

    def array(self) -> PoolArray:
        """The bytes, as an array of the device."""
        if self._closed:
            raise BugError("the pool is closed")
        views = (self._views and self._views()) or _Views()
        self._views = weakref.ref(views)
        return self._driver.array(self._address, self.size, views)

    def close(self) -> None:
        """Wait for the device, then unmap. Idempotent.

        Raises:
            BugError: a view is still in use; nothing was changed.
            CudaError: the driver failed; as much as possible has been given up.
        """
        if self._in_use():
            gc.collect()  # a traceback may hold a view in a cycle
        if self._in_use():
            raise BugError("the pool is in use: unbind the device and drop every view before the pool is closed")
        self._closed = True
        self._unmap.close()

    def _in_use(self) -> bool:
        return self._views is not None and self._views() is not None


class _Views:
    """Every view of a pool refers to one; when it is gone, so are they."""


def check_device(driver: CudaDriver, size: int) -> None:
    """Whether a pool of `size` bytes can be made.

    Raises:
        ConfigurationError: the GPU is under MPS, or has less free memory.
    """
    refuse_mps(driver)
    free, _ = driver.memory_info()
    if size > free:
        raise ConfigurationError(f"pool_size: {size} bytes are wanted, {free} bytes of device memory are free")


def refuse_mps(driver: CudaDriver) -> None:
    """Refuse a GPU where a dying process takes others with it, and its end says nothing about its device work.

    Raises:
        ConfigurationError: it is under MPS.
    """
    if driver.is_under_mps():
        raise ConfigurationError(
            f"gpu: {driver.uuid} is under MPS, which cannot be used; stop it (echo quit | nvidia-cuda-mps-control), "
            "or choose another GPU"
        )


def check_same_gpu(driver: CudaDriver, pool_uuid: str) -> None:
    """A pool can only be mapped on the GPU that it lies on.

    Raises:
        ConfigurationError: this process computes on another one.
    """
    if driver.uuid != pool_uuid:
        raise ConfigurationError(
            f"gpu: the pool is on {pool_uuid} and this runner on {driver.uuid}; give the cache manager and the runner "
            "the same GPU (gpu, CUDA_VISIBLE_DEVICES, device_ids in compose)"
        )


def check_pattern(driver: CudaDriver, address: int, pattern: bytes) -> None:
    """What is mapped here must be the manager's pool.

    Raises:
        ConfigurationError: it is other memory.
    """
    if driver.read(address, len(pattern)) != pattern:
        raise ConfigurationError(
            "pool_memory: what was mapped is not the cache manager's pool, its mark is not there; restart the cache "
            "manager, and choose another pool_memory if that does not help"
        )


@contextlib.contextmanager
def errors_as_configuration(purpose: str, size: int) -> Iterator[None]:
    """Name the setting that an operator can change when the driver refuses to make a pool of `size` bytes."""
    try:
        yield
    except CudaError as error:
        if error.code == CudaStatus.OUT_OF_MEMORY:
            raise ConfigurationError(f"pool_size: cannot take {size} bytes of device memory: {error}") from error
        raise ConfigurationError(f"pool_memory: cannot {purpose}: {error}") from error
