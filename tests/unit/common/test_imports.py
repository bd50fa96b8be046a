"""What a machine without a GPU does not pay for."""

import subprocess
import sys

import pytest

GPU_ONLY = ("triton", "cupy", "cuda")


@pytest.mark.parametrize(
    "program",
    [
        "import pagekeeper.cli.main, pagekeeper.cli.up",
        "import gateway.__main__",
        "import cache_manager.__main__",
        "import model_runner.__main__; from kernels.select import select_kernels; select_kernels('cpu')",
    ],
)
def test_no_process_on_the_cpu_imports_what_only_a_gpu_needs(program: str) -> None:
    program += f"; import sys; print([m for m in {GPU_ONLY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
