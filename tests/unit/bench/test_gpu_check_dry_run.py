"""The whole GPU check as far as a CPU carries it, as a person runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.timeout(300)  # half a minute of work, on a machine that may have others
def test_the_dry_run_passes_and_is_stamped_as_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.gpu_check", "--dry-run", "--out", str(tmp_path), "--budget-s", "280"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + (tmp_path / "log.txt").read_text()[-5000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["kind"].startswith("dry run")
    assert report["complete"]
    sections = ["facts", "kernels", "bandwidth", "serve", "ipc", "exchange", "vmm", "extras"]
    assert list(report["sections"]) == sections
    assert "dry run" in (tmp_path / "report.txt").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.txt", "report.json", "report.txt"]
