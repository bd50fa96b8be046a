"""Which device a runner takes, and why not the GPU."""

import pytest
import torch

from model_runner.choose_device import choose_device
from pagekeeper.common.cuda_probe import CudaDevice, CudaDriver, CudaProblem, CudaUnavailable
from pagekeeper.common.errors import ConfigurationError

NONE = CudaUnavailable(CudaProblem.NO_DRIVER, "there is no NVIDIA driver", "install one")


def driver(capability: tuple[int, int] = (9, 0)) -> CudaDriver:
    return CudaDriver((13, 0), (CudaDevice(0, "Played GPU", "uuid", capability, 1 << 30),))


def choose(
    wanted: str,
    found: CudaDriver | CudaUnavailable,
    built_for: str | None = "13.0",
    finds: bool = True,
    gpu: int = 0,
    missing: tuple[str, ...] = (),
) -> tuple[torch.device, str | None]:
    return choose_device(wanted, gpu, lambda: found, built_for, lambda: finds, lambda name: name not in missing)


def test_the_cpu_is_taken_without_a_question() -> None:
    def fail() -> CudaDriver:
        raise AssertionError("nobody asked for a GPU")

    assert choose_device("cpu", 0, fail) == (torch.device("cpu"), None)


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_a_gpu_that_can_be_used_is_used(wanted: str) -> None:
    assert choose(wanted, driver()) == (torch.device("cuda", 0), None)


@pytest.mark.parametrize(
    ("found", "built_for", "finds", "words"),
    [
        (NONE, "13.0", False, "there is no NVIDIA driver; install one"),
        (driver(), None, False, "built for the CPU; install one for CUDA: pip install"),
        (driver((7, 5)), "13.0", True, "GPU 0, Played GPU, has compute capability 7.5"),
        (driver(), "14.0", False, "torch for CUDA 14.0 finds no GPU that the driver's CUDA 13.0 has"),
    ],
)
def test_one_that_cannot_is_an_error_if_it_was_asked_for(
    found: CudaDriver | CudaUnavailable, built_for: str | None, finds: bool, words: str
) -> None:
    with pytest.raises(ConfigurationError, match="device: cuda cannot be used") as raised:
        choose("cuda", found, built_for, finds)
    assert words in str(raised.value)
    device, obstacle = choose("auto", found, built_for, finds)
    assert device == torch.device("cpu")
    assert obstacle is not None
    assert words in obstacle


def test_of_several_gpus_the_one_that_was_named_is_taken() -> None:
    both = CudaDriver((13, 0), driver((7, 5)).devices + driver().devices)
    assert choose("cuda", both, gpu=1) == (torch.device("cuda", 1), None)
    with pytest.raises(ConfigurationError, match="there is no GPU 2; this process sees 2"):
        choose("cuda", both, gpu=2)


def test_without_its_packages_a_gpu_is_of_no_use() -> None:
    with pytest.raises(ConfigurationError, match="missing: triton, cupy; install Pagekeeper's extra"):
        choose("cuda", driver(), missing=("triton", "cupy"))
    assert choose("auto", driver(), missing=("cuda",))[0] == torch.device("cpu")
