"""Reading float8 e4m3 two by two: 16 bytes at once, on devices with and without instructions for it.

A matrix instruction takes 16-bit elements in pairs along the dimension that is summed over. For V that is not the
dimension it is stored along, and what turns 16-bit elements around on their way from shared memory cannot turn bytes:
Triton then reads them one by one. So the pool is read as 16-bit words of two neighbouring elements, which are turned
around together and taken apart in registers, and head_dim falls into even and odd columns.
"""

import triton
import triton.language as tl

from kernels.triton.interpret import INTERPRETED

LIFT = tl.constexpr(2.0**100)
"""Factor of what is multiplied with unpacked elements, so that bfloat16 products stay in the middle of the range."""
UNLIFT = tl.constexpr(2.0**20)
"""What is left to do to a product of a lifted factor and unpacked elements."""

_UNPACK = tl.constexpr("""{
    .reg .b32 word, low;
    shl.b32 low, $2, 8;
    and.b32 word, low, 0x7f007f00;
    shr.b32 word, word, 4;
    lop3.b32 $0, low, 0x80008000, word, 0xea;
    and.b32 word, $2, 0x7f007f00;
    shr.b32 word, word, 4;
    lop3.b32 $1, $2, 0x80008000, word, 0xea;
}""")


@triton.jit
def unpack(words):
    """The low and the high elements of int16 `words`, times 2**-120: as bfloat16, when interpreted as float32.

    Sign, exponent and mantissa are moved to their places in the wider type, whose exponent has another bias by 120.
    That is exact, subnormal elements included (the interpreter loses those of bfloat16). Written by hand for two words
    at once it takes 7 instructions for four elements; Triton's own code for the same takes 19.
    """
    if INTERPRETED:
        bits = words.to(tl.int32)
        low = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True)
        high = (((bits & 0x8000) << 16) | ((bits & 0x7F00) << 12)).to(tl.float32, bitcast=True)
    else:
        low, high = tl.inline_asm_elementwise(
            _UNPACK, "=r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    return low, high
