"""The linear layer on cuBLAS.

Not a kernel of ours: for plain matrix products torch calls cuBLAS, which picks among kernels tuned for each device and
shape, wgmma and split-K among them, and can be captured. There is nothing to fuse that would pay for less than that.
"""

from kernels.reference.linear import prepare_linear

__all__ = ["prepare_linear"]
