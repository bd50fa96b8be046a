"""What Triton's interpreter cannot do the way a device does it."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether kernels defined from now on are interpreted: read at import, as `triton.jit` itself does."""


@triton.jit
def dot(a, b, accumulator):
    """`a @ b + accumulator` in float32; a product of float32 is exact to float32, not TF32.

    The interpreter multiplies the bit patterns of bfloat16 as if they were integers, so it gets float32 instead.
    """
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, accumulator, input_precision="ieee")
