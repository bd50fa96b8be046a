"""What a kernel ships as: one entry for each configuration that a launch may choose, for the check without a device.

A module of `kernels.triton` that defines kernels has a function `compile_specs() -> Iterator[CompileSpec]`. It walks
the same tuning table as the launches do, so that what is checked is what runs. `make gpu-compile` compiles every entry
for every capability and reads registers, memory, occupancy and instructions from the result.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triton.runtime.jit import JITFunction

CAPABILITIES = (80, 90, 100)
"""Compute capabilities that kernels are compiled for: Ampere, Hopper and Blackwell data-centre devices."""


@dataclass(frozen=True, kw_only=True)
class CompileSpec:
    """One kernel with one choice of constants and launch options, and what its machine code must be like.

    `signature` and `constants` together name every argument of the kernel once. What a launch turns into a constant
    belongs to `constants`: `tl.constexpr` arguments, and arguments that are None or, unless the kernel forbids it by
    `do_not_specialize`, the integer 1.
    """

    name: str
    """Kernel first, then what sets the configuration apart: `decode_attention head_dim=128 bf16 block=16`.

    Unique on each capability: configurations of one name, tuned differently by capability, are one row of the table.
    """
    kernel: "JITFunction[Any]"
    """The function as `@triton.jit` returns it."""
    signature: Mapping[str, str]
    """Run-time argument to type: `*bf16`, `*fp16`, `*fp32`, `*fp8e4nv`, `*i64`, `i64`, `i32`, `fp32`."""
    constants: Mapping[str, Any]
    """Compile-time argument to value."""
    divisible_by_16: tuple[str, ...] = ()
    """Integer arguments that are multiples of 16 at run time. Pointers always count as aligned to 16 bytes."""
    num_warps: int = 4
    num_stages: int = 3
    capabilities: tuple[int, ...] = CAPABILITIES
    """Where this configuration ships."""
    wide_loads: bool = False
    """The main stream (K and V, rows of activations) must be read 16 bytes at a time by each thread."""
    matrix: bool = False
    """Tensor cores must be used: `mma.sync`, `wgmma` or `tcgen05.mma`."""
    min_ctas: int = 1
    """CTAs that must fit on one multiprocessor at once, by registers, shared memory and threads."""
