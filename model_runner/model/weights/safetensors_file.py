"""Weights in the safetensors format."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pagekeeper.common.errors import ConfigurationError

_DTYPES = ("F32", "F16", "BF16")


class SafetensorsFile:
    """One .safetensors file; the library checks its header against the file's size before it is believed.

    Attributes:
        dtypes: how each tensor is stored, by its name.

    Raises:
        ConfigurationError: the header is not valid, or a tensor's dtype is not a float of 16 or 32 bits.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file: Any = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            reason = " ".join(str(error).split())  # it may quote the file
            raise ConfigurationError(f"weights: {path.name} is not a safetensors file: {reason}") from error
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        for name in self._file.keys():  # noqa: SIM118 - safe_open is no mapping
            if not name.isprintable():
                raise ConfigurationError(f"weights: {path.name} has a tensor named {name!r}")
            tensor = self._file.get_slice(name)
            self.dtypes[name] = str(tensor.get_dtype())
            if self.dtypes[name] not in _DTYPES:
                raise ConfigurationError(f"weights: tensor {name} is {self.dtypes[name]}, not {', '.join(_DTYPES)}")
            self._shapes[name] = tuple(tensor.get_shape())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor."""
        return self._shapes

    def read(self, name: str) -> torch.Tensor:
        """The tensor in the dtype it is stored in."""
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor
