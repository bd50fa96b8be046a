"""The probe against a driver library that says what a test tells it to."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagekeeper.common.cuda_probe import CudaDevice, CudaDriver, CudaProblem, CudaUnavailable, probe_cuda

UUID = "4f3c6a1e-0b7d-4c52-9a88-1d2e3f405162"


class FakeLibrary:
    """Answers as libcuda does: through pointers, with a code.

    Args:
        codes: of the calls that fail, by name.
        capabilities: one device for each.
    """

    def __init__(
        self,
        version: int = 13000,
        capabilities: tuple[tuple[int, int], ...] = ((9, 0),),
        codes: dict[str, int] | None = None,
    ) -> None:
        self.version = version
        self.capabilities = capabilities
        self.codes = codes or {}
        self.calls: list[str] = []

    def __getattr__(self, call: str) -> Callable[..., int]:
        answer = getattr(self, f"answer_{call}")

        def called(*args: Any) -> int:
            self.calls.append(call)
            if call not in self.codes:
                answer(*args)
            return self.codes.get(call, 0)

        return called

    def answer_cuDriverGetVersion(self, version: Any) -> None:
        version.contents.value = self.version

    def answer_cuInit(self, flags: int) -> None:
        assert flags == 0

    def answer_cuDeviceGetCount(self, count: Any) -> None:
        count.contents.value = len(self.capabilities)

    def answer_cuDeviceGet(self, handle: Any, ordinal: int) -> None:
        handle.contents.value = 40 + ordinal

    def answer_cuDeviceGetName(self, name: Any, size: int, handle: int) -> None:
        name.value = f"GPU number {handle - 40}".encode()
        assert size == len(name)

    def answer_cuDeviceGetUuid_v2(self, raw: Any, handle: int) -> None:
        raw.raw = bytes.fromhex(UUID.replace("-", ""))
        assert handle >= 40

    def answer_cuDeviceTotalMem_v2(self, size: Any, handle: int) -> None:
        size.contents.value = (handle - 39) << 36

    def answer_cuDeviceGetAttribute(self, value: Any, attribute: int, handle: int) -> None:
        value.contents.value = self.capabilities[handle - 40][{75: 0, 76: 1}[attribute]]

    def answer_cuGetErrorName(self, code: int, name: Any) -> None:
        name.contents.value = f"CUDA_ERROR_NUMBER_{code}".encode()


def probe(library: FakeLibrary, inaccessible: tuple[str, ...] = ()) -> CudaDriver | CudaUnavailable:
    return probe_cuda(lambda: library, lambda node: str(node) not in inaccessible)


def problem(library: FakeLibrary, inaccessible: tuple[str, ...] = ()) -> CudaUnavailable:
    found = probe(library, inaccessible)
    assert isinstance(found, CudaUnavailable)
    assert "\n" not in str(found)
    return found


def test_every_device_is_described() -> None:
    found = probe(FakeLibrary(version=13010, capabilities=((9, 0), (7, 5))))
    assert found == CudaDriver(
        (13, 1),
        (
            CudaDevice(0, "GPU number 0", UUID, (9, 0), 1 << 36),
            CudaDevice(1, "GPU number 1", UUID, (7, 5), 1 << 37),
        ),
    )
    assert [device.is_usable for device in found.devices] == [True, False]


def test_a_machine_without_a_driver_is_told_to_install_one() -> None:
    def load() -> ctypes.CDLL:
        raise OSError("libcuda.so.1: cannot open shared object file")

    found = probe_cuda(load)
    assert isinstance(found, CudaUnavailable)
    assert found.problem is CudaProblem.NO_DRIVER
    assert "install driver 580 or newer" in found.remedy


def test_an_old_driver_is_named_with_what_is_needed_and_not_initialised() -> None:
    library = FakeLibrary(version=12040)
    found = problem(library)
    assert found.problem is CudaProblem.DRIVER_TOO_OLD
    assert "supports CUDA 12.4, and 13.0 is needed" in found.reason
    assert library.calls == ["cuDriverGetVersion"]


def test_a_hidden_device_is_traced_to_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    found = problem(FakeLibrary(codes={"cuInit": 100}))
    assert found.problem is CudaProblem.NO_DEVICE
    assert "CUDA_VISIBLE_DEVICES=-1" in found.remedy


def test_a_machine_without_a_device_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert problem(FakeLibrary(capabilities=())).problem is CudaProblem.NO_DEVICE


@pytest.mark.parametrize("code", [100, 304, 800, 999])
def test_a_device_node_that_may_not_be_opened_is_named(code: int) -> None:
    found = problem(FakeLibrary(codes={"cuInit": code}), inaccessible=("/dev/nvidiactl",))
    assert found.problem is CudaProblem.NO_ACCESS
    assert "/dev/nvidiactl" in found.reason
    assert "nvidia-uvm" not in found.reason


def test_a_driver_that_was_updated_under_a_running_kernel_is_named() -> None:
    assert problem(FakeLibrary(codes={"cuInit": 803})).problem is CudaProblem.DRIVER_MISMATCH


def test_a_device_that_is_too_old_is_named() -> None:
    found = problem(FakeLibrary(capabilities=((6, 1), (7, 5))))
    assert found.problem is CudaProblem.DEVICE_TOO_OLD
    assert "GPU number 1 has compute capability 7.5, and 8.0 is needed" in found.reason


def test_any_other_failure_is_given_by_name() -> None:
    found = problem(FakeLibrary(codes={"cuInit": 802}))
    assert found.problem is CudaProblem.OTHER
    assert "cuInit of the NVIDIA driver failed: CUDA_ERROR_NUMBER_802 (802)" in found.reason
    nameless = problem(FakeLibrary(codes={"cuDeviceGetName": 999, "cuGetErrorName": 1}))
    assert "cuDeviceGetName of the NVIDIA driver failed: error 999" in nameless.reason


def test_the_nodes_that_are_looked_at_are_the_drivers() -> None:
    looked_at: list[Path] = []
    probe_cuda(lambda: FakeLibrary(codes={"cuInit": 100}), lambda node: looked_at.append(node) or True)
    assert looked_at == [Path("/dev/nvidiactl"), Path("/dev/nvidia-uvm")]
