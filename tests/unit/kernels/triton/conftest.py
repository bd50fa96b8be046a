"""Kernels are interpreted in this process: whatever compiles them does so in a process of its own.

That is decided by whatever imports triton first, and pytest reads this file before any test beside it. It is an error
if a test module read earlier has imported triton.
"""

from kernels.select import select_kernels

select_kernels("triton-interpret")
