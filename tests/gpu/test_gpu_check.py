"""The GPU check on a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.gpu
@pytest.mark.timeout(400)
def test_everything_that_only_a_gpu_can_show_is_shown(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.gpu_check", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + (tmp_path / "log.txt").read_text()[-5000:]
