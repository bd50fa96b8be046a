"""The randomness of draws: the same bits as in `kernels.reference.noise`, and numbers made of them in float32."""

import triton
import triton.language as tl

_STEP = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST_FACTOR = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = tl.constexpr(0x94D049BB133111EB)
_LEAST = tl.constexpr(2.0**-33)


@triton.jit
def draw_key(seed, candidate, position):
    """64 bits, uint64."""
    high, low, _, _ = tl.philox(seed, position.to(tl.int32), candidate.to(tl.int32), 0, 0)
    return (high.to(tl.uint64) << 32) | low.to(tl.uint64)


@triton.jit
def token_bits(key, token):
    """32 bits, int32, for each `token`."""
    bits = key + ((token >> 1) + 1).to(tl.uint64) * _STEP
    bits = (bits ^ (bits >> 30)) * _FIRST_FACTOR
    bits = (bits ^ (bits >> 27)) * _SECOND_FACTOR
    bits = bits ^ (bits >> 31)
    return tl.where((token & 1) > 0, bits >> 32, bits).to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit
def exponential(bits):
    """A number from 2**-33 to 22.9 for each of `bits`: the reference's to within 2**-21."""
    # Of odds and 1 - odds the lesser is exact, so that a number is as exact if it is small as if it is large.
    late = bits >= 0
    lesser = ((tl.where(late, ~bits, bits) & 0x7FFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2**-32
    odds = tl.where(late, lesser, 1 - lesser)
    # If 1 - lesser has been rounded, a factor puts that right.
    factor = tl.where(late, 1.0, lesser / tl.maximum(1 - odds, _LEAST))
    return tl.where(odds < 1, -tl.log(odds) * factor, lesser)
