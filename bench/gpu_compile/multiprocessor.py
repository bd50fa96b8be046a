"""How many CTAs of a kernel fit on one multiprocessor at once.

An estimate: a device may give less shared memory to CTAs and more to its L1 cache, and a grid may be too small.

The limits are those of the CUDA C++ programming guide's table of technical specifications per compute capability; how
registers are handed out follows the CUDA occupancy calculator.
"""

from dataclasses import dataclass

_KIB = 1024

REGISTERS = 65536
PARTITIONS = 4
"""Each has a quarter of the registers; a warp lives in one of them."""
WARPS = 64
CTAS = 32
WARP_THREADS = 32
_REGISTER_GRANULE = 256
"""Registers are handed out to a warp in multiples of this."""
_SHARED_GRANULE = 128
_SHARED_RESERVE = 1 * _KIB
"""Bytes of shared memory that the system takes for each CTA."""


@dataclass(frozen=True)
class Multiprocessor:
    """What differs between the compute capabilities that kernels ship for. Bytes, and columns of tensor memory."""

    shared: int
    shared_per_cta: int
    tensor_memory: int = 0


MULTIPROCESSORS = {
    80: Multiprocessor(shared=164 * _KIB, shared_per_cta=163 * _KIB),
    90: Multiprocessor(shared=228 * _KIB, shared_per_cta=227 * _KIB),
    100: Multiprocessor(shared=228 * _KIB, shared_per_cta=227 * _KIB, tensor_memory=512),
}


@dataclass(frozen=True)
class Resources:
    """What one CTA takes: registers a thread, bytes of shared memory, columns of tensor memory, warps."""

    registers: int
    shared: int
    tensor_memory: int
    num_warps: int


@dataclass(frozen=True)
class Occupancy:
    """CTAs that are resident at once, and the resource that allows no more."""

    ctas: int
    limited_by: str


def occupancy(capability: int, resources: Resources) -> Occupancy:
    """Zero CTAs where one alone asks for more than there is."""
    machine = MULTIPROCESSORS[capability]
    ctas = {
        "registers": _by_registers(resources),
        "shared memory": _by_shared_memory(machine, resources.shared),
        "warps": WARPS // resources.num_warps,
        "CTA slots": CTAS,
    }
    if resources.tensor_memory:
        ctas["tensor memory"] = machine.tensor_memory // resources.tensor_memory
    limited_by = min(ctas, key=lambda resource: ctas[resource])
    return Occupancy(ctas[limited_by], limited_by)


def _by_registers(resources: Resources) -> int:
    per_warp = _round_up(max(resources.registers, 1) * WARP_THREADS, _REGISTER_GRANULE)
    return REGISTERS // PARTITIONS // per_warp * PARTITIONS // resources.num_warps


def _by_shared_memory(machine: Multiprocessor, shared: int) -> int:
    if shared > machine.shared_per_cta:
        return 0
    return machine.shared // _round_up(shared + _SHARED_RESERVE, _SHARED_GRANULE)


def _round_up(value: int, granule: int) -> int:
    return -(-value // granule) * granule
