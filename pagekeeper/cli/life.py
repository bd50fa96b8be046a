"""One process of ours, from its spawn to its end: its log, and the line in it that says that it is ready."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

from pagekeeper.cli import child
from pagekeeper.common.names import unknown_variables

Line = str | dict[str, Any]
"""What a process writes: a dictionary if it is a JSON log line."""

_LONGEST_LOG_LINE = 2**20


class Life:
    """A process that dies with us; see `begin`.

    Attributes:
        pid: of the process.
        ready: gives the JSON log line whose event is "ready", once it has written that.
        end: gives the exit code, negative for a signal.
    """

    def __init__(self, process: asyncio.subprocess.Process, relay: Callable[[Line], None]) -> None:
        self.pid = process.pid
        self.ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._process = process
        self._relay = relay
        self._began = time.monotonic()
        self.end = asyncio.create_task(self._until_end())

    @classmethod
    async def begin(cls, module: str, flags: Mapping[str, str | None], relay: Callable[[Line], None]) -> "Life":
        """Spawn `python -m MODULE` with these flags.

        Args:
            module: what to run.
            flags: its command line; a switch has no value.
            relay: gets each line that the process writes.
        """
        args = [part for flag, value in flags.items() for part in (flag, value) if part is not None]
        process = await asyncio.create_subprocess_exec(
            *child.command(module, *args),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=_LONGEST_LOG_LINE,
            env=_environment(),
            process_group=0,  # Ctrl-C is for the supervisor, who stops its children in order
        )
        return cls(process, relay)

    @property
    def seconds(self) -> float:
        """How long ago it began."""
        return time.monotonic() - self._began

    def terminate(self) -> None:
        """Ask it to end; one that is stopped is woken to hear that."""
        for number in (signal.SIGTERM, signal.SIGCONT):
            self._signal(number)

    def kill(self) -> None:
        """End it at once."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            self._process.send_signal(number)

    async def _until_end(self) -> int:
        """Pass on what the process writes until it has closed its end."""
        assert self._process.stdout is not None  # noqa: S101 - it was asked for as a pipe
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:  # longer than the limit; the reader has dropped it
                continue
            if not line:
                return await self._process.wait()
            parsed = _parse(line.decode(errors="replace").rstrip("\n"))
            self._relay(parsed)
            if isinstance(parsed, dict) and parsed.get("event") == "ready" and not self.ready.done():
                self.ready.set_result(parsed)


def _environment() -> dict[str, str]:
    """Ours without what only looks like a setting: we have warned of that, and every child would again."""
    unknown = unknown_variables()
    return {name: value for name, value in os.environ.items() if name not in unknown}


def _parse(line: str) -> Line:
    try:
        value = json.loads(line)
    except ValueError:
        return line
    return value if isinstance(value, dict) else line
