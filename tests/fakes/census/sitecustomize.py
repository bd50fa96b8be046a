"""Run at the start of every Python that has this folder on its PYTHONPATH: SIGUSR2 makes it count its asyncio tasks.

The number goes to the file PID.tasks in the folder that TEST_CENSUS names; see `tests.census`.
"""

import asyncio
import os
import signal
from pathlib import Path


def _count_tasks(*_: object) -> None:
    folder = Path(os.environ["TEST_CENSUS"])
    unfinished = folder / f"{os.getpid()}.unfinished"
    unfinished.write_text(str(len(asyncio.all_tasks())))
    unfinished.rename(folder / f"{os.getpid()}.tasks")


signal.signal(signal.SIGUSR2, _count_tasks)
