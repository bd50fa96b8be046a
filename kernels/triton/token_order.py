"""The order in which tokens of a row are preferred, as integers, and their weights."""

import triton
import triton.language as tl

LAST_INDEX = tl.constexpr(0x7FFFFFFF)
"""In a key: no token has this index, so the key lies below every token's of the same logit."""


@triton.jit
def _ordered(bits):
    """Floats as integers of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def token_key(value, index):
    """An int64 for each token, no two alike: the higher the logit the larger, and of equals the first is largest."""
    # -0 equals 0.
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    return (_ordered(bits).to(tl.int64) << 32) | tl.cast(0x7FFFFFFF - index, tl.int64)


@triton.jit
def value_of(key):
    """The logit in a key."""
    return _ordered((key >> 32).to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def index_of(key):
    """The token in a key."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def factor_of(temperature):
    """What differences of logits are multiplied by to be exponents of 2."""
    # Neither 0 nor infinite for any temperature above 0, so that no product of 0 and infinity arises.
    return (1.4426950408889634 / tl.clamp(temperature, 1e-30, 1e30)).to(tl.float32)


@triton.jit
def weights_of(values, highest, factor):
    """The likeliest has 1, so nothing overflows; a logit of -inf has 0."""
    return tl.exp2((values - highest) * factor)
