"""Which kind of memory the pool gets: the decision alone."""

from dataclasses import dataclass
from typing import Literal

from cache_manager.memory.interface import Backend
from pagekeeper.common.errors import ConfigurationError

Device = Literal["auto", "cpu", "cuda"]
Wanted = Literal["auto", "memfd", "cuda_ipc", "cuda_vmm"]


@dataclass(frozen=True)
class Choice:
    """The decision. `why` is for the log."""

    backend: Backend
    why: str
    may_change: bool = False
    """Nobody asked for CUDA IPC by name: where it does not work, CUDA VMM does as well."""


def choose_backend(device: Device, wanted: Wanted, obstacle: str | None) -> Choice:
    """Decide by the settings `device` and `pool_memory`, and by what there is.

    Args:
        device: where the model runs.
        wanted: what the pool should be.
        obstacle: why CUDA cannot be used here, naming the setting; None if it can. Not asked for a pool of the CPU.

    Raises:
        ConfigurationError: an explicit wish cannot be met; the message begins with the setting.
    """
    if wanted in ("cuda_ipc", "cuda_vmm"):
        if device == "cpu":
            raise ConfigurationError(f"pool_memory: {wanted} is a GPU's memory, device is cpu; choose memfd or auto")
        if obstacle:
            raise ConfigurationError(f"pool_memory: {wanted} cannot be had: {obstacle}")
        return Choice(wanted, "asked for")
    if wanted == "memfd":
        if device == "cuda":
            raise ConfigurationError("pool_memory: memfd is the CPU's memory, device is cuda; choose cuda_ipc or auto")
        return Choice("memfd", "asked for")
    if device == "cpu":
        return Choice("memfd", "device is cpu")
    if obstacle is None:
        return Choice("cuda_ipc", "device is cuda" if device == "cuda" else "there is a GPU", may_change=True)
    if device == "cuda":
        raise ConfigurationError(obstacle)
    return Choice("memfd", obstacle)
