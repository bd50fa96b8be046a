"""`CudaDriver` by way of CuPy (the runtime API) and cuda-bindings (the driver API), both optional.

Signatures: docs.cupy.dev, cupy.cuda.runtime; nvidia.github.io/cuda-python, cuda.bindings.driver, of versions 12 and 13.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from cache_manager.memory.cuda_driver import CudaError
from cache_manager.memory.interface import PoolArray
from pagekeeper.common.cuda_probe import CudaDriver as Probed
from pagekeeper.common.cuda_probe import CudaUnavailable, probe_cuda
from pagekeeper.common.errors import ConfigurationError


@dataclass(frozen=True)
class CudaModules:
    """The packages, which are imported only where a GPU is asked for: `import cupy` takes a second."""

    cupy: Any
    bindings: Any
    """cuda.bindings.driver."""


def load_cuda_driver(gpu: int, probe: Callable[[], Probed | CudaUnavailable] = probe_cuda) -> "CupyDriver":
    """CUDA on the GPU with this index.

    Args:
        gpu: as this process counts, from 0.
        probe: says what there is.

    Raises:
        ConfigurationError: no driver, too old a driver, no such GPU, no package. One line that says what to do.
    """
    found = probe()
    if isinstance(found, CudaUnavailable):
        raise ConfigurationError(f"device: cuda cannot be used: {found}")
    if gpu >= len(found.devices):
        raise ConfigurationError(f"gpu: there is no GPU {gpu}; this process sees {len(found.devices)}, counted from 0")
    device = found.devices[gpu]
    if not device.is_usable:
        raise ConfigurationError(f"gpu: GPU {gpu}, {device.name}, is too old; choose another one")
    try:
        return CupyDriver(_import_modules(), gpu, f"GPU-{device.uuid}")
    except CudaError as error:
        raise ConfigurationError(f"gpu: GPU {gpu} cannot be used: {error}") from error


class CupyDriver:
    """The real driver. Any thread may call it: each call selects the GPU first.

    Args:
        modules: the packages.
        gpu: the index of the GPU.
        uuid: of the GPU.

    Raises:
        CudaError: the GPU cannot be used.
    """

    def __init__(self, modules: CudaModules, gpu: int, uuid: str) -> None:
        self.uuid = uuid
        self._cupy = modules.cupy
        self._bindings = modules.bindings
        self._gpu = gpu
        self._runtime("free", 0)  # makes the context
        self._driver("cuInit", 0)

    def is_under_mps(self) -> bool:
        """See `CudaDriver`."""
        attribute = self._bindings.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MPS_ENABLED
        return bool(self._driver("cuDeviceGetAttribute", attribute, self._driver("cuDeviceGet", self._gpu)))

    def memory_info(self) -> tuple[int, int]:
        """See `CudaDriver`."""
        free, total = self._runtime("memGetInfo")
        return free, total

    def write(self, address: int, data: bytes) -> None:
        """See `CudaDriver`."""
        host = ctypes.create_string_buffer(data, len(data))
        kind = self._cupy.cuda.runtime.memcpyHostToDevice
        self._runtime("memcpy", address, ctypes.addressof(host), len(data), kind)
        # A copy from pageable memory may return before its bytes have arrived. (CUDA API synchronization behavior)
        self.synchronize()

    def read(self, address: int, size: int) -> bytes:
        """See `CudaDriver`."""
        host = ctypes.create_string_buffer(size)
        self._runtime("memcpy", ctypes.addressof(host), address, size, self._cupy.cuda.runtime.memcpyDeviceToHost)
        return host.raw

    def synchronize(self) -> None:
        """See `CudaDriver`."""
        self._runtime("deviceSynchronize")

    def array(self, address: int, size: int, owner: object) -> PoolArray:
        """See `CudaDriver`: a CuPy array."""
        memory = self._cupy.cuda.UnownedMemory(address, size, owner, self._gpu)
        array: PoolArray = self._cupy.ndarray((size,), self._cupy.uint8, self._cupy.cuda.MemoryPointer(memory, 0))
        return array

    def allocate(self, size: int) -> int:
        """See `CudaDriver`."""
        return int(self._runtime("malloc", size))

    def free(self, address: int) -> None:
        """See `CudaDriver`."""
        self._runtime("free", address)

    def export_handle(self, address: int) -> bytes:
        """See `CudaDriver`."""
        return bytes(self._runtime("ipcGetMemHandle", address))

    def open_handle(self, handle: bytes) -> int:
        """See `CudaDriver`."""
        return int(self._runtime("ipcOpenMemHandle", handle))

    def close_handle(self, address: int) -> None:
        """See `CudaDriver`."""
        self._runtime("ipcCloseMemHandle", address)

    def extent(self, address: int) -> int:
        """See `CudaDriver`."""
        base, size = self._driver("cuMemGetAddressRange", address)
        return int(base) + int(size) - address

    def granularity(self) -> int:
        """See `CudaDriver`."""
        recommended = self._bindings.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        return int(self._driver("cuMemGetAllocationGranularity", self._properties(), recommended))

    def reserve(self, size: int) -> int:
        """See `CudaDriver`."""
        return int(self._driver("cuMemAddressReserve", size, 0, 0, 0))

    def unreserve(self, address: int, size: int) -> None:
        """See `CudaDriver`."""
        self._driver("cuMemAddressFree", address, size)

    def create(self, size: int) -> int:
        """See `CudaDriver`."""
        return int(self._driver("cuMemCreate", size, self._properties(), 0))

    def release(self, handle: int) -> None:
        """See `CudaDriver`."""
        self._driver("cuMemRelease", handle)

    def export_descriptor(self, handle: int) -> int:
        """See `CudaDriver`."""
        return int(self._driver("cuMemExportToShareableHandle", handle, self._descriptor_type(), 0))

    def import_descriptor(self, descriptor: int) -> int:
        """See `CudaDriver`."""
        return int(self._driver("cuMemImportFromShareableHandle", descriptor, self._descriptor_type()))

    def map(self, address: int, size: int, handle: int) -> None:
        """See `CudaDriver`."""
        self._driver("cuMemMap", address, size, 0, handle, 0)

    def allow_access(self, address: int, size: int) -> None:
        """See `CudaDriver`."""
        access = self._bindings.CUmemAccessDesc()
        access.location.type = self._bindings.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self._gpu
        access.flags = self._bindings.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._driver("cuMemSetAccess", address, size, [access], 1)

    def unmap(self, address: int, size: int) -> None:
        """See `CudaDriver`."""
        self._driver("cuMemUnmap", address, size)

    def _properties(self) -> Any:  # noqa: ANN401 - cuda-bindings is optional, so its types are not known
        properties = self._bindings.CUmemAllocationProp()
        properties.type = self._bindings.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.requestedHandleTypes = self._descriptor_type()
        properties.location.type = self._bindings.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self._gpu
        return properties

    def _descriptor_type(self) -> Any:  # noqa: ANN401 - as above
        return self._bindings.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _runtime(self, name: str, *arguments: object) -> Any:  # noqa: ANN401 - CuPy is optional, as above
        self._call_runtime("setDevice", self._gpu)
        return self._call_runtime(name, *arguments)

    def _call_runtime(self, name: str, *arguments: object) -> Any:  # noqa: ANN401 - as above
        runtime = self._cupy.cuda.runtime
        try:
            return getattr(runtime, name)(*arguments)
        except runtime.CUDARuntimeError as error:
            code_name, _, description = str(error).partition(": ")
            raise CudaError(f"cuda{name[0].upper()}{name[1:]}", error.status, code_name, description) from error

    def _driver(self, name: str, *arguments: object) -> Any:  # noqa: ANN401 - as above
        """The value that a function returns beside its code, a tuple of several, or None."""
        self._call_runtime("setDevice", self._gpu)
        code, *values = getattr(self._bindings, name)(*arguments)
        if int(code):
            _, description = self._bindings.cuGetErrorString(code)
            raise CudaError(name, int(code), code.name, description.decode() if description else "no description")
        return values[0] if len(values) == 1 else tuple(values) or None


def _import_modules() -> CudaModules:
    try:
        return CudaModules(import_module("cupy"), import_module("cuda.bindings.driver"))
    except ImportError as error:
        raise ConfigurationError(
            "device: cuda needs the packages cupy and cuda-bindings; install Pagekeeper's extra: pip install '.[cuda]'"
        ) from error
