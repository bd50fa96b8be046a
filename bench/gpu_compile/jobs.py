"""Which builds there are to make: the configurations that kernel modules offer, times compute capabilities."""

import importlib
import pkgutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import kernels.triton
from bench.gpu_compile.build import Build, build
from kernels.triton.compile_spec import CompileSpec


@dataclass(frozen=True)
class Job:
    """One build to make. A kernel cannot travel between processes, so a worker looks it up by its names."""

    module: str
    spec: str
    capability: int

    def run(self) -> Build:
        """Compile and judge."""
        ours = (spec for spec in _specs(self.module) if spec.name == self.spec and self.capability in spec.capabilities)
        return build(next(ours), self.capability)


def kernel_modules() -> list[str]:
    """All modules of kernels.triton, by name."""
    return [module.name for module in pkgutil.iter_modules(kernels.triton.__path__, "kernels.triton.")]


def jobs_for(modules: Sequence[str], capabilities: set[int], only: str) -> Iterator[Job]:
    """Builds of the configurations in `modules` that have `only` in their name, for those of `capabilities` they name.

    Raises:
        ValueError: two configurations for one capability have one name.
    """
    found: set[tuple[str, int]] = set()
    for module in modules:
        for spec in _specs(module):
            for capability in spec.capabilities:
                if (spec.name, capability) in found:
                    raise ValueError(f"two configurations for sm_{capability} have the name {spec.name!r}")
                found.add((spec.name, capability))
                if only in spec.name and capability in capabilities:
                    yield Job(module, spec.name, capability)


def _specs(module: str) -> Iterator[CompileSpec]:
    """The configurations that `module` ships; none if it defines no kernels."""
    compile_specs = getattr(importlib.import_module(module), "compile_specs", None)
    return iter(()) if compile_specs is None else compile_specs()
