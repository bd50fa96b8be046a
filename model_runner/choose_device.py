"""On which device the model runs."""

from collections.abc import Callable
from typing import Literal

import structlog
import torch

from pagekeeper.common.cuda_probe import CudaDriver, CudaUnavailable, probe_cuda
from pagekeeper.common.errors import ConfigurationError

log = structlog.get_logger()


def choose_device(
    wanted: Literal["auto", "cpu", "cuda"],
    probe: Callable[[], CudaDriver | CudaUnavailable] = probe_cuda,
    torch_cuda: str | None = torch.version.cuda,
    torch_finds_one: Callable[[], bool] = torch.cuda.is_available,
) -> torch.device:
    """The device for `wanted`; "auto" is the GPU if it can be used. Of several GPUs it is the first visible one.

    Args:
        wanted: the setting.
        probe: asks the driver.
        torch_cuda: the CUDA that torch was built for; None: it was built for the CPU alone.
        torch_finds_one: whether torch can use a GPU.

    Raises:
        ConfigurationError: the GPU was asked for and cannot be used; says why and what to do.
    """
    if wanted == "cpu":
        return torch.device("cpu")
    obstacle = _why_not_cuda(probe(), torch_cuda, torch_finds_one)
    if obstacle is None:
        return torch.device("cuda", 0)
    if wanted == "cuda":
        raise ConfigurationError(f"device: cuda cannot be used: {obstacle}")
    log.info("the model runs on the CPU", why=obstacle)
    return torch.device("cpu")


def _why_not_cuda(
    driver: CudaDriver | CudaUnavailable, torch_cuda: str | None, torch_finds_one: Callable[[], bool]
) -> str | None:
    if isinstance(driver, CudaUnavailable):
        return str(driver)
    if torch_cuda is None:
        return "this torch is built for the CPU; install one for CUDA: pip install --force-reinstall torch"
    if not driver.devices[0].is_usable:
        name, capability = driver.devices[0].name, ".".join(map(str, driver.devices[0].compute_capability))
        return f"{name}, the first GPU, has compute capability {capability}; choose another by CUDA_VISIBLE_DEVICES"
    if not torch_finds_one():
        return f"torch for CUDA {torch_cuda} finds no GPU that the driver's CUDA {driver.cuda[0]}.{driver.cuda[1]} has"
    return None
