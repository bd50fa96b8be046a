"""Where a server runs: decided once, by whoever starts all of its processes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pagekeeper.cli.machine import Packages
from pagekeeper.common.cuda_probe import CudaDriver, CudaUnavailable
from pagekeeper.common.errors import ConfigurationError

INSTALL_CUDA = "install gcc, a torch that is built for CUDA, and Pagekeeper's extra: pip install --editable '.[cuda]'"


@dataclass(frozen=True)
class Device:
    """The decision. `why` is for the log."""

    name: Literal["cpu", "cuda"]
    why: str


def choose_device(
    wanted: Literal["auto", "cpu", "cuda"],
    probe: Callable[[], CudaDriver | CudaUnavailable],
    find_packages: Callable[[], Packages],
) -> Device:
    """Use the GPU where everything for it is there, unless told otherwise.

    Raises:
        ConfigurationError: the GPU was asked for and cannot be used.
    """
    if wanted == "cpu":
        return Device("cpu", "asked for")
    obstacle = _why_not_cuda(probe(), find_packages)
    if obstacle is None:
        return Device("cuda", "asked for" if wanted == "cuda" else "there is a GPU")
    if wanted == "cuda":
        raise ConfigurationError(f"device: cuda cannot be used: {obstacle}")
    return Device("cpu", obstacle)


def _why_not_cuda(cuda: CudaDriver | CudaUnavailable, find_packages: Callable[[], Packages]) -> str | None:
    """What keeps this machine from serving on a GPU and what to do about it; None if nothing does."""
    if isinstance(cuda, CudaUnavailable):
        return str(cuda)
    missing = find_packages().missing_for_cuda()
    return f"missing: {', '.join(missing)}; {INSTALL_CUDA}" if missing else None
