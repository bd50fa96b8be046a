"""The operations on torch's fastest CPU paths."""

from kernels.reference import copy_blocks, prepare_attention, prepare_linear, rms_norm, rotary, silu_mul

__all__ = ["copy_blocks", "prepare_attention", "prepare_linear", "rms_norm", "rotary", "silu_mul"]
