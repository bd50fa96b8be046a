"""Which device a server runs on."""

import pytest

from pagekeeper.cli.device import choose_device
from pagekeeper.cli.machine import Packages
from pagekeeper.common.errors import ConfigurationError
from tests.unit.cli.machines import CPU_PACKAGES, CUDA_PACKAGES, H200, NO_DRIVER


def test_auto_is_the_gpu_where_everything_for_it_is_there() -> None:
    assert choose_device("auto", H200, CUDA_PACKAGES).name == "cuda"


def test_auto_is_the_cpu_where_there_is_no_driver_and_the_log_says_why() -> None:
    device = choose_device("auto", NO_DRIVER, CUDA_PACKAGES)
    assert device.name == "cpu"
    assert "there is no NVIDIA driver" in device.why


def test_auto_is_the_cpu_where_the_packages_for_the_gpu_are_missing() -> None:
    device = choose_device("auto", H200, CPU_PACKAGES)
    assert device.name == "cpu"
    assert "missing: torch built for CUDA, triton, cupy, cuda-bindings" in device.why


def test_the_cpu_may_be_asked_for_beside_a_gpu() -> None:
    assert choose_device("cpu", H200, CUDA_PACKAGES).name == "cpu"


def test_the_gpu_may_be_asked_for() -> None:
    assert choose_device("cuda", H200, CUDA_PACKAGES).name == "cuda"


def test_a_gpu_that_was_asked_for_and_is_not_there_is_an_error_with_the_reason() -> None:
    with pytest.raises(ConfigurationError, match=r"device: cuda cannot be used: there is no NVIDIA driver; install"):
        choose_device("cuda", NO_DRIVER, CUDA_PACKAGES)


def test_a_gpu_that_was_asked_for_without_its_packages_is_an_error_that_names_them() -> None:
    without_cupy = Packages({name: v for name, v in CUDA_PACKAGES.versions.items() if name != "cupy"}, "13.0")
    with pytest.raises(ConfigurationError, match=r"missing: cupy; .* pip install"):
        choose_device("cuda", H200, without_cupy)
