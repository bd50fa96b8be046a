"""Handing out the tensors of weight files, each exactly once."""

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from pagekeeper.common.errors import ConfigurationError

_NAMES_IN_ERROR = 5


class WeightFile(Protocol):
    """One file of tensors, under the names that Hugging Face's Llama gives them."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor, as the checked header states them."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """The tensor's values in a float dtype."""
        ...


class WeightSource:
    """The tensors of all files of a model, each to be taken once.

    Args:
        files: what to read from.
        dtype: of every tensor handed out, but for those that are taken exactly.
        device: where they go, one by one.

    Raises:
        ConfigurationError: two files hold a tensor of the same name.
    """

    def __init__(self, files: Sequence[WeightFile], dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self.num_parameters = 0
        """Elements of the tensors handed out so far."""
        self._left: dict[str, tuple[WeightFile, tuple[int, ...]]] = {}
        for file in files:
            for name, shape in file.shapes().items():
                if name in self._left:
                    raise ConfigurationError(f"weights: tensor {name} is there twice")
                self._left[name] = (file, shape)

    def __contains__(self, name: str) -> bool:
        return name in self._left

    @property
    def num_bytes_left(self) -> int:
        """Bytes of the tensors that were not handed out yet, in their dtype."""
        return sum(math.prod(shape) for _, shape in self._left.values()) * self._dtype.itemsize

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor called `name`, which must have `shape`; it cannot be taken again.

        Raises:
            ConfigurationError: it is not there, or its shape differs.
        """
        # Rounded on the host: half as much travels.
        return self._take(name, shape).to(self._dtype).to(self._device)

    def take_exactly(self, name: str, *shape: int) -> torch.Tensor:
        """The same in float32 and on the host, for what is computed with at load.

        Raises:
            ConfigurationError: it is not there, or its shape differs.
        """
        return self._take(name, shape).float()

    def _take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name not in self._left:
            raise ConfigurationError(f"weights: tensor {name} is missing")
        file, found = self._left.pop(name)
        if found != shape:
            raise ConfigurationError(f"weights: tensor {name} has shape {list(found)}, the configuration {list(shape)}")
        tensor = file.read(name)
        self.num_parameters += tensor.numel()
        return tensor

    def finish(self) -> None:
        """Check that nothing is left.

        Raises:
            ConfigurationError: there are tensors the model has no place for.
        """
        if self._left:
            raise ConfigurationError(f"weights: no place for tensors {_listing(self._left)}")


def _listing(names: Iterable[str]) -> str:
    names = sorted(names)
    more = len(names) - _NAMES_IN_ERROR
    return ", ".join(names[:_NAMES_IN_ERROR]) + (f" and {more} more" if more > 0 else "")
