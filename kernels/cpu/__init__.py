"""The operations on torch's fastest CPU paths, in float32."""

from kernels.cpu.copy_blocks import copy_blocks
from kernels.cpu.linear import prepare_linear
from kernels.cpu.paged_attention import prepare_attention
from kernels.cpu.rms_norm import add_rms_norm, rms_norm
from kernels.cpu.silu_mul import silu_mul
from kernels.reference.logits import edit_logits, logprobs
from kernels.reference.sampling import sample

__all__ = [
    "add_rms_norm",
    "copy_blocks",
    "edit_logits",
    "logprobs",
    "prepare_attention",
    "prepare_linear",
    "rms_norm",
    "sample",
    "silu_mul",
]
