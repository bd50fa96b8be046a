"""On which device the model runs."""

import importlib.util
from collections.abc import Callable
from typing import Literal

import torch

from pagekeeper.common.cuda_probe import CudaDriver, CudaUnavailable, probe_cuda
from pagekeeper.common.errors import ConfigurationError

_PACKAGES = ("triton", "cupy", "cuda")
"""What kernels and pool need, by what is imported; `cuda` comes with cuda-bindings."""


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def choose_device(
    wanted: Literal["auto", "cpu", "cuda"],
    gpu: int,
    probe: Callable[[], CudaDriver | CudaUnavailable] = probe_cuda,
    torch_cuda: str | None = torch.version.cuda,
    torch_finds_one: Callable[[], bool] = torch.cuda.is_available,
    is_installed: Callable[[str], bool] = _is_installed,
) -> tuple[torch.device, str | None]:
    """The device for `wanted`; "auto" is the GPU if it can be used, else the CPU together with what stood in the way.

    Args:
        wanted: the setting.
        gpu: which GPU, as this process counts from 0.
        probe: asks the driver.
        torch_cuda: the CUDA that torch was built for; None: it was built for the CPU alone.
        torch_finds_one: whether torch can use a GPU.
        is_installed: whether there is a package of this name.

    Raises:
        ConfigurationError: the GPU was asked for and cannot be used; says why and what to do.
    """
    if wanted == "cpu":
        return torch.device("cpu"), None
    obstacle = _why_not_cuda(gpu, probe(), torch_cuda, torch_finds_one, is_installed)
    if obstacle is None:
        return torch.device("cuda", gpu), None
    if wanted == "cuda":
        raise ConfigurationError(f"device: cuda cannot be used: {obstacle}")
    return torch.device("cpu"), obstacle


def _why_not_cuda(
    gpu: int,
    driver: CudaDriver | CudaUnavailable,
    torch_cuda: str | None,
    torch_finds_one: Callable[[], bool],
    is_installed: Callable[[str], bool],
) -> str | None:
    if isinstance(driver, CudaUnavailable):
        return str(driver)
    if torch_cuda is None:
        return "this torch is built for the CPU; install one for CUDA: pip install --force-reinstall torch"
    missing = [name for name in _PACKAGES if not is_installed(name)]
    if missing:
        return f"missing: {', '.join(missing)}; install Pagekeeper's extra: pip install --editable '.[cuda]'"
    if gpu >= len(driver.devices):
        return f"gpu: there is no GPU {gpu}; this process sees {len(driver.devices)}, counted from 0"
    device = driver.devices[gpu]
    if not device.is_usable:
        capability = ".".join(map(str, device.compute_capability))
        return f"GPU {gpu}, {device.name}, has compute capability {capability}; choose another by --gpu"
    if not torch_finds_one():
        return f"torch for CUDA {torch_cuda} finds no GPU that the driver's CUDA {driver.cuda[0]}.{driver.cuda[1]} has"
    return None
