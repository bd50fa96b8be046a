"""What real processes have at a moment: tasks, threads, descriptors and memory, to see that nothing of it leaks.

Tasks cannot be seen from outside, so the processes must have been started with `environment`.
"""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

_LIMIT_S = 60.0


@dataclass(frozen=True)
class Census:
    """Of one process. `memory` is resident, in bytes."""

    tasks: int
    threads: int
    descriptors: int
    memory: int

    def exceeds(self, other: "Census", memory_margin: int) -> bool:
        """Whether there is more of anything, and of memory more than the margin."""
        return (
            self.tasks > other.tasks
            or self.threads > other.threads
            or self.descriptors > other.descriptors
            or self.memory > other.memory + memory_margin
        )


def environment(folder: Path) -> dict[str, str]:
    """Variables for the processes to be counted; `folder` is where they put their counts."""
    hook = Path(__file__).parent / "fakes" / "census"
    return {"PYTHONPATH": str(hook), "TEST_CENSUS": str(folder)}


def take(pids: dict[str, int], folder: Path) -> dict[str, Census]:
    """Count what each process has now."""
    return {name: _take(psutil.Process(pid), folder) for name, pid in pids.items()}


def _take(process: psutil.Process, folder: Path) -> Census:
    with process.oneshot():
        threads, descriptors, memory = process.num_threads(), process.num_fds(), process.memory_info().rss
    return Census(_count_tasks(process.pid, folder), threads, descriptors, memory)


def _count_tasks(pid: int, folder: Path) -> int:
    answer = folder / f"{pid}.tasks"
    os.kill(pid, signal.SIGUSR2)
    deadline = time.monotonic() + _LIMIT_S
    while not answer.exists():
        assert time.monotonic() < deadline, f"process {pid} does not count its tasks"
        time.sleep(0.01)
    tasks = int(answer.read_text())
    answer.unlink()
    return tasks
