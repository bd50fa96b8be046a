"""What the NVIDIA driver of this machine offers, asked of the driver alone: neither torch nor CuPy is loaded.

Looking makes no context and takes no device memory.
"""

import ctypes
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

MIN_CUDA = (13, 0)
"""What a driver must support: the packages of the `cuda` extra are built for CUDA 13."""
MIN_CUDA_DRIVER = "580"
"""The first driver that does, as `nvidia-smi` numbers them (CUDA toolkit release notes, table of driver versions)."""
MIN_COMPUTE_CAPABILITY = (8, 0)
"""The first with bfloat16 matrix instructions, and the oldest that the kernels are compiled for."""

_LIBRARY = "libcuda.so.1"
_NODES = (Path("/dev/nvidiactl"), Path("/dev/nvidia-uvm"))

# cuda.h: CUresult and CUdevice_attribute.
_NO_DEVICE = 100
_OPERATING_SYSTEM = 304
_NOT_PERMITTED = 800
_DRIVER_MISMATCH = 803
_UNKNOWN = 999
_CAPABILITY_MAJOR = 75
_CAPABILITY_MINOR = 76
_MAY_BE_MISSING_NODES = (_NO_DEVICE, _OPERATING_SYSTEM, _NOT_PERMITTED, _UNKNOWN)


@dataclass(frozen=True)
class CudaDevice:
    """One GPU, or the part of one that MIG makes."""

    ordinal: int
    """As the CUDA of this process counts, which depends on CUDA_VISIBLE_DEVICES; `uuid` does not."""
    name: str
    uuid: str
    compute_capability: tuple[int, int]
    total_memory: int
    """Bytes."""

    @property
    def is_usable(self) -> bool:
        """Whether the kernels run on it."""
        return self.compute_capability >= MIN_COMPUTE_CAPABILITY


@dataclass(frozen=True)
class CudaDriver:
    """A driver that can be used, with at least one device that can be used."""

    cuda: tuple[int, int]
    """The newest CUDA that the driver supports."""
    devices: tuple[CudaDevice, ...]
    """All that there are, in the order of their ordinals."""


class CudaProblem(Enum):
    """Why there is none."""

    NO_DRIVER = "no driver"
    DRIVER_TOO_OLD = "driver too old"
    DRIVER_MISMATCH = "driver mismatch"
    NO_ACCESS = "no access"
    NO_DEVICE = "no device"
    DEVICE_TOO_OLD = "device too old"
    OTHER = "other"


@dataclass(frozen=True)
class CudaUnavailable:
    """Nothing here can be used. `reason` says what was found, `remedy` what to do about it."""

    problem: CudaProblem
    reason: str
    remedy: str

    def __str__(self) -> str:
        """Both, on one line."""
        return f"{self.reason}; {self.remedy}"


class _CallFailed(Exception):
    def __init__(self, call: str, code: int) -> None:
        super().__init__(call, code)
        self.call = call
        self.code = code


def _load() -> ctypes.CDLL:
    return ctypes.CDLL(_LIBRARY)


def _is_accessible(node: Path) -> bool:
    return os.access(node, os.R_OK | os.W_OK)


def probe_cuda(
    load: Callable[[], ctypes.CDLL] = _load, is_accessible: Callable[[Path], bool] = _is_accessible
) -> CudaDriver | CudaUnavailable:
    """Ask the driver.

    Args:
        load: loads the driver's library, or raises OSError.
        is_accessible: whether this process may open a device node.
    """
    try:
        library = load()
    except OSError:
        return CudaUnavailable(
            CudaProblem.NO_DRIVER,
            f"there is no NVIDIA driver: {_LIBRARY} cannot be loaded",
            f"install driver {MIN_CUDA_DRIVER} or newer; give a container the GPU as compose.gpu.yaml does",
        )
    try:
        return _ask(library)
    except _CallFailed as failure:
        return _explain(library, failure, [node for node in _NODES if not is_accessible(node)])


def _ask(library: ctypes.CDLL) -> CudaDriver | CudaUnavailable:
    version = _integer(library, "cuDriverGetVersion")
    cuda = (version // 1000, version % 1000 // 10)
    if cuda < MIN_CUDA:
        return CudaUnavailable(
            CudaProblem.DRIVER_TOO_OLD,
            f"the NVIDIA driver supports CUDA {_dotted(cuda)}, and {_dotted(MIN_CUDA)} is needed",
            f"install driver {MIN_CUDA_DRIVER} or newer",
        )
    _call(library, "cuInit", 0)
    devices = tuple(_device(library, ordinal) for ordinal in range(_integer(library, "cuDeviceGetCount")))
    if not devices:
        raise _CallFailed("cuDeviceGetCount", _NO_DEVICE)
    if not any(device.is_usable for device in devices):
        newest = max(devices, key=lambda device: device.compute_capability)
        return CudaUnavailable(
            CudaProblem.DEVICE_TOO_OLD,
            f"{newest.name} has compute capability {_dotted(newest.compute_capability)}, "
            f"and {_dotted(MIN_COMPUTE_CAPABILITY)} is needed",
            "use a GPU of the Ampere generation or newer",
        )
    return CudaDriver(cuda, devices)


def _device(library: ctypes.CDLL, ordinal: int) -> CudaDevice:
    handle = _integer(library, "cuDeviceGet", ordinal)
    name = ctypes.create_string_buffer(256)
    _call(library, "cuDeviceGetName", name, len(name), handle)
    raw_uuid = ctypes.create_string_buffer(16)
    _call(library, "cuDeviceGetUuid_v2", raw_uuid, handle)
    memory = ctypes.c_size_t()
    _call(library, "cuDeviceTotalMem_v2", ctypes.pointer(memory), handle)
    major, minor = (
        _integer(library, "cuDeviceGetAttribute", attribute, handle)
        for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR)
    )
    return CudaDevice(
        ordinal, name.value.decode(errors="replace"), str(uuid.UUID(bytes=raw_uuid.raw)), (major, minor), memory.value
    )


def _explain(library: ctypes.CDLL, failure: _CallFailed, inaccessible: list[Path]) -> CudaUnavailable:
    if failure.code == _DRIVER_MISMATCH:
        return CudaUnavailable(
            CudaProblem.DRIVER_MISMATCH,
            f"{_LIBRARY} and the NVIDIA kernel module are of different versions",
            "restart the machine after a driver update; a container must not bring a driver library of its own",
        )
    if failure.code in _MAY_BE_MISSING_NODES and inaccessible:
        missing = ", ".join(str(node) for node in inaccessible)
        return CudaUnavailable(
            CudaProblem.NO_ACCESS,
            f"the NVIDIA driver is there, but this process may not use {missing}",
            "give the container the GPU as compose.gpu.yaml does, or the user access to these files",
        )
    if failure.code == _NO_DEVICE:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return CudaUnavailable(
            CudaProblem.NO_DEVICE,
            "the NVIDIA driver sees no GPU",
            f"CUDA_VISIBLE_DEVICES={visible} may hide it" if visible is not None else "nvidia-smi should list one",
        )
    return CudaUnavailable(
        CudaProblem.OTHER,
        f"{failure.call} of the NVIDIA driver failed: {_error_name(library, failure.code)}",
        "nvidia-smi may say more",
    )


def _integer(library: ctypes.CDLL, call: str, *args: object) -> int:
    """What a call leaves in its first argument."""
    value = ctypes.c_int()
    _call(library, call, ctypes.pointer(value), *args)
    return value.value


def _call(library: ctypes.CDLL, call: str, *args: object) -> None:
    code = getattr(library, call)(*args)
    if code:
        raise _CallFailed(call, code)


def _error_name(library: ctypes.CDLL, code: int) -> str:
    name = ctypes.c_char_p()
    if library.cuGetErrorName(code, ctypes.pointer(name)) or name.value is None:
        return f"error {code}"
    return f"{name.value.decode()} ({code})"


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
