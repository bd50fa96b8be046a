"""Compile one kernel configuration for one compute capability, and say what is wrong with the result."""

import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from bench.gpu_compile.machine_code import (
    WIDE_BYTES,
    Site,
    count_spills,
    load_widths,
    main_streams,
    matrix_instructions,
    parse_resource_usage,
)
from bench.gpu_compile.multiprocessor import MULTIPROCESSORS, WARP_THREADS, Resources, occupancy
from kernels.triton.compile_spec import CompileSpec


@dataclass(frozen=True)
class Figures:
    """What the compiler made of a configuration. Bytes, but `tensor_memory`, which is columns."""

    registers: int
    stack: int
    local: int
    spills: int
    """Instructions that touch local memory."""
    shared: int
    tensor_memory: int
    ctas: int
    limited_by: str
    loads: dict[int, int]
    """Bytes that a thread reads from global memory at once, and how many such instructions there are."""
    matrix: dict[str, int]


@dataclass(frozen=True)
class Build:
    """A configuration on a capability. `figures` is None where it does not compile."""

    name: str
    capability: int
    seconds: float
    figures: Figures | None
    failures: tuple[str, ...] = ()


def build(spec: CompileSpec, capability: int) -> Build:
    """Compile `spec` and judge the result. A configuration that does not compile is a failure, not an error."""
    began = time.monotonic()
    try:
        compiled = _compile(spec, capability)
    except Exception as error:  # noqa: BLE001 - the compiler raises whatever its passes raise; each is a finding
        failure = f"does not compile: {type(error).__name__}: {error}"
        return Build(spec.name, capability, time.monotonic() - began, None, (failure,))
    figures, streams = _measure(compiled, capability)
    failures = tuple(judge(spec, capability, figures, streams))
    return Build(spec.name, capability, time.monotonic() - began, figures, failures)


def judge(spec: CompileSpec, capability: int, figures: Figures, streams: dict[Site, Counter[int]]) -> Iterator[str]:
    """Say what breaks the promises of `spec`. `streams` are the loads of the main streams by place."""
    if figures.stack or figures.local:
        yield (
            f"{figures.stack} bytes of stack and {figures.local} of local memory; "
            f"{figures.spills} instructions load from or store to them"
        )
    limit = MULTIPROCESSORS[capability].shared_per_cta
    if figures.shared > limit:
        yield f"{figures.shared} bytes of shared memory; a CTA can have {limit}"
    if spec.wide_loads:
        yield from _narrow_loads(streams)
    if spec.matrix and not figures.matrix:
        yield "no matrix instruction"
    if figures.ctas < spec.min_ctas:
        yield f"{figures.ctas} CTAs a multiprocessor instead of {spec.min_ctas}, by {figures.limited_by}"


def _narrow_loads(streams: dict[Site, Counter[int]]) -> Iterator[str]:
    if not streams:
        yield f"no tile is large enough to give every thread {WIDE_BYTES} bytes"
    for site, widths in sorted(streams.items()):
        narrow = [f"{count} of {width} bytes" for width, count in widths.items() if width < WIDE_BYTES]
        if narrow:
            yield f"narrow loads at {site}: {', '.join(narrow)}"
        elif not widths:
            yield f"the load at {site} is nowhere in the PTX"


def _compile(spec: CompileSpec, capability: int) -> CompiledKernel:
    kernel = spec.kernel
    names: list[str] = kernel.arg_names
    if sorted(names) != sorted([*spec.signature, *spec.constants]):
        raise ValueError(f"signature and constants must name each of {', '.join(names)} once")
    aligned = {name for name, kind in spec.signature.items() if kind.startswith("*")} | set(spec.divisible_by_16)
    source = ASTSource(
        kernel,
        signature={name: spec.signature.get(name, "constexpr") for name in names},
        constexprs=dict(spec.constants),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in sorted(aligned, key=names.index)},
    )
    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, WARP_THREADS), options=options)


def _measure(compiled: CompiledKernel, capability: int) -> tuple[Figures, dict[Site, Counter[int]]]:
    metadata, asm = compiled.metadata, compiled.asm
    usage = parse_resource_usage(_resource_usage(asm["cubin"]))
    widths = load_widths(asm["ptx"])
    tensor_memory = getattr(metadata, "tmem_size", 0) or 0
    resident = occupancy(capability, Resources(usage.registers, metadata.shared, tensor_memory, metadata.num_warps))
    figures = Figures(
        registers=usage.registers,
        stack=usage.stack,
        local=usage.local,
        spills=count_spills(asm["sass"]) if usage.stack or usage.local else 0,
        shared=metadata.shared,
        tensor_memory=tensor_memory,
        ctas=resident.ctas,
        limited_by=resident.limited_by,
        loads=dict(sorted(sum(widths.values(), Counter()).items())),
        matrix=dict(matrix_instructions(asm["ptx"])),
    )
    return figures, {site: widths.get(site, Counter()) for site in main_streams(asm["ttgir"], metadata.num_warps)}


def _resource_usage(cubin: bytes) -> str:
    """What the `cuobjdump` that comes with triton says about `cubin`; it reads files only."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
