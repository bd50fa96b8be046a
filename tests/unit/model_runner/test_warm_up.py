"""Steps before the first request leave nothing to be compiled for it."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_no_step_launches_a_kernel_that_binding_a_pool_has_not_compiled() -> None:
    # Compiling takes seconds, in which every stream stands still.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.fakes.kernel_variants"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
