"""Chooses a backend by name: explicitly, lazily, and never another one than was asked for."""

import torch

from kernels.interface import Kernels

NAMES = ("reference", "cpu")


def select_kernels(name: str) -> Kernels:
    """Import the backend called `name`.

    Raises:
        ValueError: there is no such backend, or this machine cannot run it; the message says which.
    """
    if name == "reference":
        from kernels import reference

        return reference
    if name == "cpu":
        if not torch.backends.mkldnn.is_available():
            raise ValueError("kernels 'cpu' need a torch that was built with oneDNN")
        from kernels import cpu

        return cpu
    raise ValueError(f"there are no kernels called {name!r}; choose one of {', '.join(NAMES)}")
