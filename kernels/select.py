"""Chooses a backend by name: explicitly, lazily, and never another one than was asked for."""

import importlib.util
import os
import sys

import torch

from kernels.interface import Kernels

_DEVICES = {
    "reference": ("cpu", "cuda"),
    "cpu": ("cpu",),
    "triton": ("cuda",),
    "triton-interpret": ("cpu",),
}
_FASTEST = {"cpu": "cpu", "cuda": "triton"}
_INTERPRET = "TRITON_INTERPRET"


def resolve_kernels(name: str, device: str) -> str:
    """The backend that `name` means on `device`, "cpu" or "cuda": "auto" is the fastest there.

    Raises:
        ValueError: that backend does not work on tensors of that device.
    """
    if name == "auto":
        return _FASTEST[device]
    if device not in _DEVICES[name]:
        fitting = [other for other, devices in _DEVICES.items() if device in devices]
        raise ValueError(f"kernels: {name!r} do not run on device {device!r}; choose one of {', '.join(fitting)}")
    return name


def select_kernels(name: str) -> Kernels:
    """Import the backend called `name`.

    "triton-interpret" runs the kernels of "triton" on the CPU, for tests. Which of the two a process can have is
    decided by whatever imports triton first in it.

    Raises:
        ValueError: there is no such backend, or this machine or process cannot run it; the message says which, why,
            and what to do.
    """
    if name == "reference":
        from kernels import reference

        return reference
    if name == "cpu":
        if not torch.backends.mkldnn.is_available():
            raise ValueError("kernels 'cpu' need a torch that was built with oneDNN")
        from kernels import cpu

        return cpu
    if name in ("triton", "triton-interpret"):
        return _triton(name)
    raise ValueError(f"there are no kernels called {name!r}; choose one of {', '.join(_DEVICES)}")


def _triton(name: str) -> Kernels:
    if importlib.util.find_spec("triton") is None:
        raise ValueError(
            f"kernels {name!r} need the package triton: pip install 'pagekeeper[triton]', or choose other --kernels"
        )
    interpret = name == "triton-interpret"
    if not interpret and not torch.cuda.is_available():
        raise ValueError(f"kernels {name!r} need a CUDA device, and torch finds none; use --device cpu --kernels cpu")
    if interpret and "triton" not in sys.modules:
        os.environ[_INTERPRET] = "1"  # read whenever a kernel is defined, triton's own among them
    import triton

    if isinstance(triton.language.sum, triton.JITFunction) is interpret:
        raise ValueError(
            f"kernels {name!r} cannot be had in this process: triton was imported "
            f"{'without' if interpret else 'with'} {_INTERPRET}=1; start another process"
        )
    from kernels import triton as backend

    return backend
