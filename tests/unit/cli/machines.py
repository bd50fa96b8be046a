"""Machines that the tests do not run on."""

from dataclasses import replace

from pagekeeper.cli.machine import Machine, Packages
from pagekeeper.common.cuda_probe import CudaDevice, CudaDriver, CudaProblem, CudaUnavailable

NO_DRIVER = CudaUnavailable(CudaProblem.NO_DRIVER, "there is no NVIDIA driver", "install one")
H200 = CudaDriver((13, 0), (CudaDevice(0, "NVIDIA H200", "uuid", (9, 0), 140 << 30),))
CPU_PACKAGES = Packages({"torch": "2.13.0+cpu"}, torch_cuda=None, c_compiler=None)
CUDA_PACKAGES = Packages(
    {"torch": "2.11.0", "triton": "3.6.0", "cupy": "14.2.0", "cuda-bindings": "13.0.1"},
    torch_cuda="13.0",
    c_compiler="/usr/bin/gcc",
)
CPU_MACHINE = Machine((3, 11, 7), CPU_PACKAGES, 2, ("avx2", "fma"), 24 << 30, 20 << 30, NO_DRIVER)
GPU_MACHINE = replace(CPU_MACHINE, packages=CUDA_PACKAGES, cuda=H200)
