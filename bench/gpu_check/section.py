"""`python -m bench.gpu_check.section NAME`: the process of one section.

Standard output is a stream of JSON objects for the parent: `plan` (names of the tasks), then for each task `begin` and
its `check`s. Whatever else the code of the section prints goes to standard error.
"""

import argparse
import dataclasses
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from bench.gpu_check.task import NEEDS_DEVICE, Check, NotRunError, Setting, Task

EXIT_DEVICE_LOST = 3
"""A CUDA error that sticks: no later task of this process could tell its own errors from it."""


def main() -> None:
    """Run the tasks of a section from the one asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module", help="with a function tasks(setting) -> list[Task]")
    parser.add_argument("--first", type=int, default=0, help="number of the first task to run")
    parser.add_argument("--share", type=int, nargs=2, default=(0, 1), metavar=("NUMBER", "OF"), help="of the tasks")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--facts", type=json.loads, default={})
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    emit = _take_standard_output()
    setting = Setting(options.dry_run, options.seed, time.monotonic() + options.seconds, options.facts)
    number_of_share, num_shares = options.share
    tasks: list[Task] = importlib.import_module(options.module).tasks(setting)[number_of_share::num_shares]
    emit({"plan": [task.name for task in tasks]})
    for number, task in list(enumerate(tasks))[options.first :]:
        emit({"begin": number, "limit_s": task.limit_s})
        for check in attempt(task, setting):
            emit({"check": dataclasses.asdict(check)})
        if not options.dry_run and not _device_answers():
            os._exit(EXIT_DEVICE_LOST)
        emit({"end": number})
    os._exit(0)  # without a tear-down, which a driver or a thread left behind may hold up


def attempt(task: Task, setting: Setting) -> Iterator[Check]:
    """Run one task; whatever goes wrong is its last check."""
    if setting.dry_run and task.needs_device:
        yield Check(task.name, "not run", reason=NEEDS_DEVICE)
        return
    try:
        yield from task.run(setting)
    except NotRunError as reason:
        yield Check(task.name, "not run", reason=str(reason))
    except Exception as error:  # noqa: BLE001 - one broken task must not hide the others
        traceback.print_exc()
        text = " ".join(f"{type(error).__name__}: {error}".split())
        yield Check(task.name, "fail", reason=text[:300])


def _device_answers() -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        traceback.print_exc()
        return False
    return True


def _take_standard_output() -> Callable[[dict[str, Any]], None]:
    """Keep the pipe to the parent for ourselves; returns what writes to it."""
    stream = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def emit(record: dict[str, Any]) -> None:
        stream.write(json.dumps(record) + "\n")

    return emit


if __name__ == "__main__":
    main()
