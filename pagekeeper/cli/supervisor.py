"""Keep one child process alive: spawn, relay its log, restart with backoff, stop in good time."""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import structlog

_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 5.0
# A child that lived so long is not in a crash loop: its next restart is quick again.
_SETTLED_S = 10.0
_LONGEST_LOG_LINE = 2**20

log = structlog.get_logger()


class ChildFailedError(Exception):
    """A child ended before it was ever ready. `code` is its exit code, negative for a signal."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name} ended with code {code} before it was ready")
        self.name = name
        self.code = code


class Child:
    """One of our processes, `python -m MODULE`, spawned so that it dies with us.

    A child says that it is ready by a JSON log line whose event is "ready". The addresses in it replace those in
    `flags`, so a restart listens where the first start did, even if that had asked for any free port.

    Args:
        name: what people call it.
        module: the module to run.
        flags: its command line, by flag.
        relay: gets each line that the child writes, as a dictionary when it is a JSON log line.
    """

    def __init__(
        self, name: str, module: str, flags: dict[str, str], relay: Callable[[str | dict[str, Any]], None]
    ) -> None:
        self.name = name
        self.ready = asyncio.Event()
        self.flags = flags
        self._module = module
        self._relay = relay
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()

    async def keep_alive(self) -> None:
        """Run the child, again each time it dies, until `stop`.

        Raises:
            ChildFailedError: it ended before it was ever ready: another try would end the same way.
        """
        delay = _FIRST_DELAY_S
        try:
            while not self._stopping.is_set():
                began = time.monotonic()
                code = await self._run()
                if self._stopping.is_set():
                    return
                if not self.ready.is_set():
                    raise ChildFailedError(self.name, code)
                if time.monotonic() - began > _SETTLED_S:
                    delay = _FIRST_DELAY_S
                log.warning("child died; restarting it", child=self.name, code=code, delay_s=delay)
                await _wait_at_most(self._stopping, delay)
                delay = min(2 * delay, _LONGEST_DELAY_S)
        finally:
            self._ended.set()

    async def stop(self, grace_s: float) -> None:
        """End the child: SIGTERM, and SIGKILL after `grace_s` seconds. `keep_alive` returns."""
        self._stopping.set()
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            if not await _wait_at_most(self._ended, grace_s):
                log.error("child does not stop; killing it", child=self.name, grace_s=grace_s)
                self.kill()
                await self._ended.wait()

    def kill(self) -> None:
        """End the child at once."""
        self._stopping.set()
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _run(self) -> int:
        """Run the child once and return its exit code."""
        args = [part for flag, value in self.flags.items() for part in (flag, value)]
        self._process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pagekeeper.cli.child", str(os.getpid()), self._module, *args),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=_LONGEST_LOG_LINE,
            process_group=0,  # Ctrl-C is for the supervisor, who stops its children in order
        )
        if self._stopping.is_set():
            process.terminate()
        await self._relay_lines(process)
        return await process.wait()

    async def _relay_lines(self, process: asyncio.subprocess.Process) -> None:
        """Pass on what the child writes until it has closed its end."""
        assert process.stdout is not None  # noqa: S101 - it was asked for as a pipe
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:  # longer than the limit; the reader has dropped it
                continue
            if not line:
                return
            parsed = _parse(line.decode(errors="replace").rstrip("\n"))
            if isinstance(parsed, dict) and parsed.get("event") == "ready":
                self._note_ready(parsed)
            self._relay(parsed)

    def _note_ready(self, event: dict[str, Any]) -> None:
        for flag in self.flags:
            address = event.get(flag.removeprefix("--").replace("-", "_"))
            if flag.endswith("listen") and address:
                self.flags[flag] = address
        self.ready.set()


def _parse(line: str) -> str | dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        return line
    return value if isinstance(value, dict) else line


async def _wait_at_most(event: asyncio.Event, seconds: float) -> bool:
    """Whether the event came in time."""
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False
    return True
