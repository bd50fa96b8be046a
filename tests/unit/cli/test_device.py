"""Which device a server runs on."""

from dataclasses import replace
from typing import Literal

import pytest

from pagekeeper.cli.device import Device, choose_device
from pagekeeper.cli.machine import Packages
from pagekeeper.common.cuda_probe import CudaDriver, CudaUnavailable
from pagekeeper.common.errors import ConfigurationError
from tests.unit.cli.machines import CPU_PACKAGES, CUDA_PACKAGES, H200, NO_DRIVER


def choose(wanted: Literal["auto", "cpu", "cuda"], cuda: CudaDriver | CudaUnavailable, packages: Packages) -> Device:
    return choose_device(wanted, lambda: cuda, lambda: packages)


def test_auto_is_the_gpu_where_everything_for_it_is_there() -> None:
    assert choose("auto", H200, CUDA_PACKAGES).name == "cuda"


def test_auto_is_the_cpu_where_there_is_no_driver_and_the_log_says_why() -> None:
    device = choose("auto", NO_DRIVER, CUDA_PACKAGES)
    assert device.name == "cpu"
    assert "there is no NVIDIA driver" in device.why


def test_auto_is_the_cpu_where_the_packages_for_the_gpu_are_missing() -> None:
    device = choose("auto", H200, CPU_PACKAGES)
    assert device.name == "cpu"
    assert "missing: torch built for CUDA, triton, cupy, cuda-bindings" in device.why


def test_the_cpu_may_be_asked_for_without_a_look_at_the_gpu() -> None:
    def unexpected() -> CudaDriver:
        pytest.fail("nobody asked")

    assert choose_device("cpu", unexpected, lambda: CUDA_PACKAGES).name == "cpu"


def test_the_gpu_may_be_asked_for() -> None:
    assert choose("cuda", H200, CUDA_PACKAGES).name == "cuda"


def test_a_gpu_that_was_asked_for_and_is_not_there_is_an_error_with_the_reason() -> None:
    with pytest.raises(ConfigurationError, match=r"device: cuda cannot be used: there is no NVIDIA driver; install"):
        choose("cuda", NO_DRIVER, CUDA_PACKAGES)


def test_a_gpu_that_was_asked_for_without_its_packages_is_an_error_that_names_them() -> None:
    versions = {name: version for name, version in CUDA_PACKAGES.versions.items() if name != "cupy"}
    without_cupy = replace(CUDA_PACKAGES, versions=versions)
    with pytest.raises(ConfigurationError, match=r"missing: cupy; .* pip install"):
        choose("cuda", H200, without_cupy)


def test_a_gpu_without_a_c_compiler_is_not_used() -> None:
    assert "missing: a C compiler" in choose("auto", H200, replace(CUDA_PACKAGES, c_compiler=None)).why
