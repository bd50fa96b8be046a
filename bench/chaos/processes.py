"""Real processes: find them, send them signals, see what they hold."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pagekeeper.cli import processes

_NAMES = {
    "cache_manager": "manager",
    "model_runner": "runner",
    "model_runner_standby": "standby",
    "gateway": "gateway",
}


def children(parent: int) -> dict[str, int]:
    """Pids of the processes that `pagekeeper up` has now, by the names of `faults.PROCESSES`."""
    return {_NAMES[name]: pid for name, pid in processes.children(parent).items() if name in _NAMES}


class Process:
    """One process for sure, whatever becomes of its pid; closed with its `with` block, which also lets it run on.

    Raises:
        ProcessLookupError: it has ended already.
    """

    def __init__(self, pid: int) -> None:
        self._descriptor = os.pidfd_open(pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.send(signal.SIGCONT)
        os.close(self._descriptor)

    def send(self, number: signal.Signals) -> None:
        """Send a signal.

        Raises:
            ProcessLookupError: it has ended.
        """
        signal.pidfd_send_signal(self._descriptor, number)

    async def ended(self, limit_s: float) -> None:
        """Wait for its end.

        Raises:
            TimeoutError: it lives on.
        """
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self._descriptor, readable.set)
        try:
            async with asyncio.timeout(limit_s):
                await readable.wait()
        finally:
            loop.remove_reader(self._descriptor)


@dataclass(frozen=True)
class Footprint:
    """What a process has; `memory` is its own resident memory in bytes, without the pool."""

    descriptors: int
    threads: int
    memory: int

    def __sub__(self, other: "Footprint") -> "Footprint":
        return Footprint(self.descriptors - other.descriptors, self.threads - other.threads, self.memory - other.memory)


def footprint(pid: int) -> Footprint:
    """What a process has now.

    Raises:
        OSError: it has ended.
    """
    root = Path(f"/proc/{pid}")
    status = dict(_fields((root / "status").read_text()))
    return Footprint(len(list((root / "fd").iterdir())), int(status["Threads"]), int(status["RssAnon"]) * 1024)


def _fields(status: str) -> Iterator[tuple[str, str]]:
    for line in status.splitlines():
        name, _, value = line.partition(":")
        yield name, value.split()[0] if value.split() else ""
