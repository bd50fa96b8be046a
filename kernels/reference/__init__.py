"""The specification of every operation, in plain torch."""

from kernels.reference.copy_blocks import copy_blocks
from kernels.reference.linear import prepare_linear
from kernels.reference.paged_attention import prepare_attention
from kernels.reference.rms_norm import rms_norm
from kernels.reference.rotary import rotary
from kernels.reference.silu_mul import silu_mul

__all__ = ["copy_blocks", "prepare_attention", "prepare_linear", "rms_norm", "rotary", "silu_mul"]
