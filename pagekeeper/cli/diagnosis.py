"""What the facts about a machine mean: which of it will do, and what to do about the rest."""

from dataclasses import dataclass

from pagekeeper.cli.device import INSTALL_CUDA
from pagekeeper.cli.machine import Machine
from pagekeeper.common.cuda_probe import CudaDriver

_MIN_PYTHON = (3, 11)
_MIN_TORCH = (2, 11)
_MIN_TRITON = (3, 6)


@dataclass(frozen=True)
class Finding:
    """One line: what it is about, whether that will do, what was found, and what to do if it will not."""

    what: str
    can: bool
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """What was looked at, and what follows from it: whether this machine can serve on the CPU and on a GPU."""

    findings: list[Finding]
    conclusions: list[Finding]


def examine(machine: Machine) -> Diagnosis:
    """Judge the facts."""
    common = [_python(machine), _torch(machine)]
    gpu = [_cuda_driver(machine), _cuda_packages(machine), _triton(machine)]
    conclusions = [
        _conclusion("serve on the CPU", common, "pagekeeper up --device cpu"),
        _conclusion("serve on a GPU", [*common, *gpu], "pagekeeper up --device cuda"),
    ]
    return Diagnosis([*common, _processor(machine), *gpu], conclusions)


def _conclusion(what: str, needs: list[Finding], command: str) -> Finding:
    obstacle = next((finding for finding in needs if not finding.can), None)
    return Finding(what, obstacle is None, f"{obstacle.what}: {obstacle.found}" if obstacle else command)


def _python(machine: Machine) -> Finding:
    return _at_least("python", ".".join(map(str, machine.python)), _MIN_PYTHON)


def _torch(machine: Machine) -> Finding:
    version = machine.packages.versions.get("torch")
    if version is None:
        return Finding("torch", False, "not installed", "install Pagekeeper again: it needs torch")
    finding = _at_least("torch", version, _MIN_TORCH)
    built_for = f"CUDA {machine.packages.torch_cuda}" if machine.packages.torch_cuda else "the CPU"
    return Finding("torch", finding.can, f"{version}, built for {built_for}", finding.remedy)


def _processor(machine: Machine) -> Finding:
    found = (
        f"{machine.num_cores} cores, {' '.join(machine.cpu_flags) or 'no vector instructions that are made use of'}, "
        f"{_gib(machine.total_memory)} of memory, {_gib(machine.available_memory)} of it available"
    )
    return Finding("processor", True, found)


def _triton(machine: Machine) -> Finding:
    version = machine.packages.versions.get("triton")
    if version is None:
        return Finding("triton", False, "not installed", "only the GPU needs it: pip install --editable '.[triton]'")
    return _at_least("triton", version, _MIN_TRITON)


def _cuda_driver(machine: Machine) -> Finding:
    if not isinstance(machine.cuda, CudaDriver):
        return Finding("NVIDIA driver", False, machine.cuda.reason, machine.cuda.remedy)
    devices = ", ".join(
        f"{device.ordinal}: {device.name} ({_gib(device.total_memory)}, compute capability "
        f"{device.compute_capability[0]}.{device.compute_capability[1]}{'' if device.is_usable else ', too old'})"
        for device in machine.cuda.devices
    )
    return Finding("NVIDIA driver", True, f"CUDA {machine.cuda.cuda[0]}.{machine.cuda.cuda[1]}; {devices}")


def _cuda_packages(machine: Machine) -> Finding:
    missing = machine.packages.missing_for_cuda()
    if missing:
        return Finding("CUDA packages", False, f"missing: {', '.join(missing)}", INSTALL_CUDA)
    installed = [f"{name} {version}" for name, version in machine.packages.versions.items()]
    return Finding("CUDA packages", True, ", ".join([*installed, str(machine.packages.c_compiler)]))


def _at_least(what: str, version: str, minimum: tuple[int, int]) -> Finding:
    major, minor = (int(part) for part in version.split(".")[:2])
    needed = f"{minimum[0]}.{minimum[1]} or newer is needed"
    return Finding(what, (major, minor) >= minimum, version, "" if (major, minor) >= minimum else needed)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
