"""The specification of every operation, in plain torch."""

from kernels.reference.copy_blocks import copy_blocks
from kernels.reference.linear import prepare_linear
from kernels.reference.logits import edit_logits, logprobs
from kernels.reference.paged_attention import prepare_attention
from kernels.reference.rms_norm import add_rms_norm, rms_norm
from kernels.reference.sampling import sample
from kernels.reference.silu_mul import silu_mul

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
