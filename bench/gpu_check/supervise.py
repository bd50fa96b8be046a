"""Runs a section in a process of its own, ends it when its time is up, and loses nothing that it has found out.

Needs the standard library alone: it must work whatever is wrong with the rest.
"""

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bench.gpu_check.task import Check

_EXIT_S = 2.0
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Section:
    """A module with a function `tasks`, and how many seconds it can count on for all of them."""

    name: str
    module: str
    limit_s: float
    num_processes: int = 1
    """Tasks are dealt out among so many, where they do not disturb each other; a dry run has one."""


def run_side_by_side(runs: Sequence["SectionRun"]) -> Iterator[Check]:
    """The checks of several runs in the order in which they are made."""
    made: queue.SimpleQueue[Check | None] = queue.SimpleQueue()

    def drain(run: SectionRun) -> None:
        try:
            for check in run.checks():
                made.put(check)
        finally:
            made.put(None)

    threads = [threading.Thread(target=drain, args=(run,), daemon=True) for run in runs]
    for thread in threads:
        thread.start()
    for _ in threads:
        yield from iter(made.get, None)


class SectionRun:
    """One section, over as many processes as it takes: after one that died, the next goes on behind its task.

    Args:
        section: to run, or the share of it that `flags` name.
        end: time.monotonic() at which it is ended.
        flags: for every process of it.
        log: where their standard error goes.
    """

    def __init__(self, section: Section, end: float, flags: Sequence[str], log: IO[bytes]) -> None:
        self._section = section
        self._end = end
        self._flags = flags
        self._log = log
        self._plan: list[str] = []
        self._next = 0
        self._running: int | None = None
        self._task_end = self._end

    def checks(self) -> Iterator[Check]:
        """Every check as it is made; tasks that were never begun are checks that were not run."""
        name = self._section.name
        while time.monotonic() < self._end:
            began = self._next
            ended = yield from self._process()
            if not self._plan:
                yield Check(name, "fail", reason=f"it planned nothing: {ended}; see log.txt")
                return
            if self._running is not None:
                yield Check(self._plan[self._running], "fail", reason=ended)
            if self._next in (began, len(self._plan)):
                break
        if not self._plan:
            yield Check(name, "not run", reason="no time was left")
        for left in self._plan[self._next :]:
            yield Check(left, "not run", reason=f"section {name} had no time left")

    def _process(self) -> Generator[Check, None, str]:
        """Run one process to its end; returns how it ended. `_running` is then the task that it died in, or None."""
        command = [sys.executable, "-m", "bench.gpu_check.section", self._section.module, *self._flags]
        command += ["--first", str(self._next), "--seconds", f"{self._end - time.monotonic():.1f}"]
        # A session of its own, so that whatever it has started can be ended with it.
        process = subprocess.Popen(
            command,
            cwd=_ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        assert process.stdout is not None
        self._running, self._task_end = None, self._end
        try:
            for record in self._records(process.stdout.fileno()):
                if "plan" in record:
                    self._plan = record["plan"]
                elif "begin" in record:
                    self._running, self._next = record["begin"], record["begin"] + 1
                    self._task_end = min(self._end, time.monotonic() + record["limit_s"])
                elif "end" in record:
                    self._running, self._task_end = None, self._end
                else:
                    yield Check(**record["check"])
            code = process.wait(max(self._end - time.monotonic(), _EXIT_S))
        except (TimeoutError, subprocess.TimeoutExpired):
            return "it did not end in time"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver that hangs may hold it up for ever
                process.wait(_EXIT_S)
            process.stdout.close()
        return (
            f"the process died of {signal.Signals(-code).name}" if code < 0 else f"the process ended with code {code}"
        )

    def _records(self, descriptor: int) -> Iterator[dict[str, Any]]:
        """What the process writes, until it closes its end.

        Raises:
            TimeoutError: the task's time is up, or the section's.
        """
        text = b""
        while True:
            readable, _, _ = select.select([descriptor], [], [], max(self._task_end - time.monotonic(), 0))
            if not readable:
                raise TimeoutError
            data = os.read(descriptor, 1 << 16)
            if not data:
                return
            *lines, text = (text + data).split(b"\n")
            yield from map(json.loads, lines)
