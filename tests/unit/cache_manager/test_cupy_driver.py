"""The real driver class, against stand-ins for its packages that accept only the documented signatures."""

import ctypes
import inspect
import sys
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest

from cache_manager.memory.cuda_driver import CudaDriver, CudaError
from cache_manager.memory.cupy_driver import CudaModules, CupyDriver, load_cuda_driver
from pagekeeper.common.cuda_probe import CudaDevice, CudaProblem, CudaUnavailable
from pagekeeper.common.cuda_probe import CudaDriver as Probed
from pagekeeper.common.errors import ConfigurationError

# cupy.cuda.runtime of CuPy 14.2 and cuda.bindings.driver of 12.9 and 13.5: function, arguments, what it returns.
RUNTIME: dict[str, tuple[str, Any]] = {
    "setDevice": ("device", None),
    "malloc": ("size", 4096),
    "free": ("ptr", None),
    "memGetInfo": ("", (10, 20)),
    "memcpy": ("dst, src, size, kind", None),
    "deviceSynchronize": ("", None),
    "ipcGetMemHandle": ("devPtr", b"h" * 64),
    "ipcOpenMemHandle": ("handle, flags=1", 8192),
    "ipcCloseMemHandle": ("devPtr", None),
}
BINDINGS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "cuInit": ("Flags", ()),
    "cuDeviceGet": ("ordinal", (3,)),
    "cuDeviceGetAttribute": ("attrib, dev", (1,)),
    "cuMemGetAddressRange": ("dptr", (4096, 1000)),
    "cuMemGetAllocationGranularity": ("prop, option", (2 << 20,)),
    "cuMemAddressReserve": ("size, alignment, addr, flags", (1 << 40,)),
    "cuMemAddressFree": ("ptr, size", ()),
    "cuMemCreate": ("size, prop, flags", (77,)),
    "cuMemRelease": ("handle", ()),
    "cuMemExportToShareableHandle": ("handle, handleType, flags", (5,)),
    "cuMemImportFromShareableHandle": ("osHandle, shHandleType", (78,)),
    "cuMemMap": ("ptr, size, offset, handle, flags", ()),
    "cuMemSetAccess": ("ptr, size, desc, count", ()),
    "cuMemUnmap": ("ptr, size", ()),
}


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_CONTEXT = 201


class RuntimeFailure(RuntimeError):
    """As cupy.cuda.runtime.CUDARuntimeError."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Packages:
    """Stand-ins for CuPy and cuda-bindings. `calls` holds each call with its arguments bound to their names."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.failing: str | None = None
        runtime = SimpleNamespace(
            CUDARuntimeError=RuntimeFailure, memcpyHostToDevice=1, memcpyDeviceToHost=2, **self._functions(RUNTIME)
        )
        cuda = SimpleNamespace(
            runtime=runtime,
            UnownedMemory=lambda ptr, size, owner, device_id: ("memory", ptr, size, owner, device_id),
            MemoryPointer=lambda mem, offset: ("pointer", mem, offset),
        )
        cupy = SimpleNamespace(cuda=cuda, uint8="uint8", ndarray=lambda shape, dtype, memptr: (shape, dtype, memptr))
        bindings = SimpleNamespace(
            CUdevice_attribute=SimpleNamespace(CU_DEVICE_ATTRIBUTE_MPS_ENABLED=133),
            CUmemAllocationGranularity_flags=SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED=1),
            CUmemAllocationType=SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1),
            CUmemAllocationHandleType=SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1),
            CUmemLocationType=SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1),
            CUmemAccess_flags=SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3),
            CUmemAllocationProp=lambda: SimpleNamespace(location=SimpleNamespace()),
            CUmemAccessDesc=lambda: SimpleNamespace(location=SimpleNamespace()),
            cuGetErrorString=lambda error: (Result.CUDA_SUCCESS, b"invalid device context"),
            **self._functions(BINDINGS),
        )
        self.modules = CudaModules(cupy, bindings)

    def _functions(self, table: dict[str, tuple[str, Any]]) -> dict[str, Callable[..., Any]]:
        return {name: self._function(name, parameters, result) for name, (parameters, result) in table.items()}

    def _function(self, name: str, parameters: str, result: object) -> Callable[..., Any]:
        signature = inspect.signature(eval(f"lambda {parameters}: None"))  # noqa: S307 (of the tables above)

        def function(*args: object) -> object:
            self.calls.append((name, dict(signature.bind(*args).arguments)))
            is_driver = name in BINDINGS
            if name == self.failing and not is_driver:
                raise RuntimeFailure(201, "cudaErrorDeviceUninitialized: invalid device context")
            if not is_driver:
                return result
            return (Result.CUDA_ERROR_INVALID_CONTEXT if name == self.failing else Result.CUDA_SUCCESS, *result)

        return function


@pytest.fixture
def packages() -> Packages:
    return Packages()


@pytest.fixture
def driver(packages: Packages) -> CudaDriver:
    made = CupyDriver(packages.modules, 2, "GPU-uuid")
    packages.calls.clear()
    return made


OWNER = object()

# Method and arguments, what it returns, and the last call that it makes.
METHODS = [
    ("is_under_mps", (), True, "cuDeviceGetAttribute", {"attrib": 133, "dev": 3}),
    ("memory_info", (), (10, 20), "memGetInfo", {}),
    ("synchronize", (), None, "deviceSynchronize", {}),
    ("allocate", (100,), 4096, "malloc", {"size": 100}),
    ("free", (4096,), None, "free", {"ptr": 4096}),
    ("export_handle", (4096,), b"h" * 64, "ipcGetMemHandle", {"devPtr": 4096}),
    ("open_handle", (b"h" * 64,), 8192, "ipcOpenMemHandle", {"handle": b"h" * 64}),
    ("close_handle", (8192,), None, "ipcCloseMemHandle", {"devPtr": 8192}),
    ("extent", (4100,), 996, "cuMemGetAddressRange", {"dptr": 4100}),
    ("reserve", (100,), 1 << 40, "cuMemAddressReserve", {"size": 100, "alignment": 0, "addr": 0, "flags": 0}),
    ("unreserve", (1 << 40, 100), None, "cuMemAddressFree", {"ptr": 1 << 40, "size": 100}),
    ("release", (77,), None, "cuMemRelease", {"handle": 77}),
    ("export_descriptor", (77,), 5, "cuMemExportToShareableHandle", {"handle": 77, "handleType": 1, "flags": 0}),
    ("import_descriptor", (5,), 78, "cuMemImportFromShareableHandle", {"osHandle": 5, "shHandleType": 1}),
    ("map", (1, 2, 77), None, "cuMemMap", {"ptr": 1, "size": 2, "offset": 0, "handle": 77, "flags": 0}),
    ("unmap", (1, 2), None, "cuMemUnmap", {"ptr": 1, "size": 2}),
]


@pytest.mark.parametrize(("method", "arguments", "result", "call", "sent"), METHODS)
def test_every_method_is_one_documented_call(
    packages: Packages, driver: CudaDriver, method: str, arguments: tuple, result: object, call: str, sent: dict
) -> None:
    assert getattr(driver, method)(*arguments) == result
    assert packages.calls[0] == ("setDevice", {"device": 2})
    assert packages.calls[-1] == (call, sent)


def test_memory_of_the_vmm_lies_on_this_gpu_and_can_be_exported(packages: Packages, driver: CudaDriver) -> None:
    assert driver.granularity() == 2 << 20
    assert driver.create(100) == 77
    driver.allow_access(1, 2)
    granularity, create, access = (sent for name, sent in packages.calls if name != "setDevice")
    for properties in (granularity["prop"], create["prop"]):
        assert (properties.location.id, properties.location.type) == (2, 1)
        assert (properties.type, properties.requestedHandleTypes) == (1, 1)
    (description,) = access["desc"]
    assert (access["ptr"], access["size"], access["count"]) == (1, 2, 1)
    assert (description.location.id, description.location.type, description.flags) == (2, 1, 3)


def test_a_few_bytes_are_copied_and_have_arrived(
    packages: Packages, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = ctypes.create_string_buffer(8)
    runtime = packages.modules.cupy.cuda.runtime
    monkeypatch.setattr(runtime, "memcpy", lambda dst, src, size, kind: ctypes.memmove(dst, src, size))
    driver.write(ctypes.addressof(device), b"\0mark\0")
    assert packages.calls[-1][0] == "deviceSynchronize"
    assert driver.read(ctypes.addressof(device), 6) == b"\0mark\0"


def test_an_array_is_the_memory_itself_and_keeps_its_owner(driver: CudaDriver) -> None:
    assert driver.array(4096, 100, OWNER) == ((100,), "uint8", ("pointer", ("memory", 4096, 100, OWNER, 2), 0))


def test_there_is_no_method_that_is_not_tested() -> None:
    tested = {method for method, *_ in METHODS} | {"granularity", "create", "allow_access", "read", "write", "array"}
    assert tested == {name for name in vars(CupyDriver) if not name.startswith("_")}
    assert tested | {"uuid"} == {name for name in vars(CudaDriver) if not name.startswith("_")}


@pytest.mark.parametrize(
    ("method", "arguments", "failing", "message"),
    [
        ("open_handle", (b"h",), "ipcOpenMemHandle", "cudaIpcOpenMemHandle: cudaErrorDeviceUninitialized"),
        ("map", (1, 2, 77), "cuMemMap", "cuMemMap: CUDA_ERROR_INVALID_CONTEXT"),
        ("synchronize", (), "setDevice", "cudaSetDevice: cudaErrorDeviceUninitialized"),
    ],
)
def test_errors_carry_the_call_and_the_name_of_the_code(
    packages: Packages, driver: CudaDriver, method: str, arguments: tuple, failing: str, message: str
) -> None:
    packages.failing = failing
    with pytest.raises(CudaError) as caught:
        getattr(driver, method)(*arguments)
    assert str(caught.value) == f"{message} (invalid device context)"
    assert caught.value.code == 201
    assert caught.value.name == message.split(": ")[1]


# Loading

H200 = Probed((13, 0), (CudaDevice(0, "NVIDIA H200", "1234", (9, 0), 140 << 30), CudaDevice(1, "Old", "5", (7, 0), 1)))


def test_without_a_driver_the_probes_answer_is_the_error() -> None:
    missing = CudaUnavailable(CudaProblem.NO_DRIVER, "there is no driver", "install one")
    with pytest.raises(ConfigurationError, match=r"^device: cuda cannot be used: there is no driver; install one$"):
        load_cuda_driver(0, lambda: missing)


@pytest.mark.parametrize(
    ("gpu", "message"),
    [(2, r"^gpu: there is no GPU 2; this process sees 2, counted from 0$"), (1, r"^gpu: GPU 1, Old, is too old")],
)
def test_a_wrong_gpu_is_named(gpu: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load_cuda_driver(gpu, lambda: H200)


@pytest.mark.parametrize("missing", ["cupy", "cuda.bindings.driver"])
def test_a_missing_package_is_named_only_when_a_gpu_is_asked_for(
    missing: str, packages: Packages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", packages.modules.cupy)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", packages.modules.bindings)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigurationError, match=r"^device: cuda needs the packages cupy and cuda-bindings; install"):
        load_cuda_driver(0, lambda: H200)


def test_a_gpu_that_cannot_be_used_is_named(packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", packages.modules.cupy)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", packages.modules.bindings)
    assert load_cuda_driver(0, lambda: H200).uuid == "GPU-1234"
    packages.failing = "free"
    with pytest.raises(ConfigurationError, match=r"^gpu: GPU 0 cannot be used: cudaFree: "):
        load_cuda_driver(0, lambda: H200)
