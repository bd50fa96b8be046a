"""A section whose tasks go wrong in every way that a process can."""

import os
import signal
import sys
import time
from collections.abc import Iterator

from bench.gpu_check.task import Check, NotRunError, Setting, Task, recorded


def tasks(setting: Setting) -> list[Task]:
    return [
        Task("well", _well),
        Task("device only", _well, needs_device=True),
        Task("raises", _raises),
        Task("is killed", _is_killed),
        Task("hangs", _hangs, limit_s=1.0),
        Task("cannot", _cannot),
        Task("last", _well),
    ]


def _well(setting: Setting) -> Iterator[Check]:
    sys.stdout.write("whatever libraries print\n")
    yield recorded("a fact", str(sorted(setting.facts)), 1.5)


def _raises(setting: Setting) -> Iterator[Check]:
    yield recorded("before it raised", "")
    raise ValueError("no\nsuch thing")


def _is_killed(setting: Setting) -> Iterator[Check]:
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    yield recorded("never", "")


def _hangs(setting: Setting) -> Iterator[Check]:
    yield recorded("before it hung", "")
    time.sleep(600)


def _cannot(setting: Setting) -> Iterator[Check]:
    raise NotRunError("not here")
    yield
