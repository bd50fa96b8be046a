"""What this machine has that decides what Pagekeeper can run here. Nothing large is imported to find out."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pagekeeper.common.cuda_probe import CudaDriver, CudaUnavailable, probe_cuda
from pagekeeper.common.errors import ConfigurationError

_DISTRIBUTIONS = {
    "torch": ("torch",),
    "triton": ("triton",),
    "cupy": ("cupy-cuda13x", "cupy"),
    "cuda-bindings": ("cuda-bindings",),
}
_CUDA_PACKAGES = ("triton", "cupy", "cuda-bindings")
_CPU_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "sve")
"""Those that the arithmetic of a model makes use of."""


@dataclass(frozen=True)
class Packages:
    """What is installed beside what every installation has."""

    versions: Mapping[str, str]
    """Of torch, triton, cupy and cuda-bindings, where they are there."""
    torch_cuda: str | None
    """The CUDA that torch was built for."""
    c_compiler: str | None
    """Which one Triton would use for the host's side of a kernel launch."""

    def missing_for_cuda(self) -> list[str]:
        """What the GPU needs and is not there, in words."""
        needs = [
            ("torch built for CUDA", self.torch_cuda),
            *((name, name in self.versions) for name in _CUDA_PACKAGES),
            ("a C compiler", self.c_compiler),
        ]
        return [name for name, there in needs if not there]


@dataclass(frozen=True)
class Machine:
    """The facts, as they were found."""

    python: tuple[int, int, int]
    packages: Packages
    num_cores: int
    """That this process may use."""
    cpu_flags: tuple[str, ...]
    total_memory: int
    """Bytes, as is `available_memory`."""
    available_memory: int
    cuda: CudaDriver | CudaUnavailable


def look_around() -> Machine:
    """Find the facts.

    Raises:
        ConfigurationError: this is not Linux.
    """
    if sys.platform != "linux":
        raise ConfigurationError(
            "Pagekeeper needs Linux: its pool lives in a memfd, and a pidfd tells when a runner ends"
        )
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (int(meminfo[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    return Machine(
        python=(sys.version_info.major, sys.version_info.minor, sys.version_info.micro),
        packages=find_packages(),
        num_cores=len(os.sched_getaffinity(0)),
        cpu_flags=_cpu_flags(Path("/proc/cpuinfo").read_text()),
        total_memory=total,
        available_memory=available,
        cuda=probe_cuda(),
    )


def find_packages() -> Packages:
    """Look the packages up without importing them."""
    versions = {name: version for name, distributions in _DISTRIBUTIONS.items() if (version := _version(distributions))}
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return Packages(versions, _torch_cuda(), compiler)


def _version(distributions: tuple[str, ...]) -> str | None:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _torch_cuda() -> str | None:
    """What `torch.version.cuda` would be; importing torch takes three seconds."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return None
    found = re.search(r"^cuda\b.*= '([\d.]+)'$", Path(torch.origin).with_name("version.py").read_text(), re.MULTILINE)
    return found[1] if found else None


def _cpu_flags(cpuinfo: str) -> tuple[str, ...]:
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    present = set(found[1].split()) if found else set()
    return tuple(flag for flag in _CPU_FLAGS if flag in present)
