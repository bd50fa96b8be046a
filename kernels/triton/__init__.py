"""The operations as Triton kernels, for CUDA devices; see `kernels.select` for how they are interpreted on the CPU."""

from kernels.reference.logits import edit_logits, logprobs
from kernels.triton.copy_blocks import copy_blocks
from kernels.triton.linear import prepare_linear
from kernels.triton.paged_attention import prepare_attention
from kernels.triton.rms_norm import add_rms_norm, rms_norm
from kernels.triton.sampling import sample
from kernels.triton.silu_mul import silu_mul

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
