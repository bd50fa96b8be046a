"""Manager, gateway and runners without a supervisor: each is started by hand, with flags and failpoints of its own."""

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Self, TypeVar

from bench.chaos.processes import Process
from bench.chaos.waiting import RECOVERY_LIMIT_S, NoRecoveryError, until
from pagekeeper.cli.child import command
from pagekeeper.cli.processes import is_stopped
from pagekeeper.common.failpoints import VARIABLE
from pagekeeper.common.sockets import RuntimeDir

T = TypeVar("T")

_LONGEST_LINE = 2**20


class Stack:
    """All processes end with the `async with` block, and with this program in any case.

    Args:
        model: directory.
        pool_size: such as 64MiB.
        log: where all of them write.
        environment: variables of each.

    Attributes:
        runtime_dir: of their sockets.
        gateway: address of the gateway, once that has been ready.
        admin: address of the admin port, once the manager has been ready.
        met: names of the runners that the gateway has met.
    """

    def __init__(self, model: Path, pool_size: str, log: Path, environment: Mapping[str, str]) -> None:
        self._model = model
        self._pool_size = pool_size
        self._log = log
        self._environment = environment
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._ready: dict[str, asyncio.Event] = {}
        self._readers: set[asyncio.Task[None]] = set()
        self.gateway = self.admin = "127.0.0.1:0"
        self.met: set[str] = set()

    async def __aenter__(self) -> Self:
        self._stack = contextlib.ExitStack()
        self.runtime_dir = RuntimeDir(Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="pk-"))))
        self._file = self._stack.enter_context(self._log.open("wb"))
        return self

    async def __aexit__(self, *exc: object) -> None:
        for process in self._processes.values():
            if process.returncode is None:
                process.kill()
        await asyncio.gather(*(process.wait() for process in self._processes.values()), *self._readers)
        self._stack.close()

    async def start(self, name: str, *flags: str, failpoints: str = "") -> None:
        """Start the manager, the gateway, or a runner of any other name; nothing may run under that name.

        Args:
            name: "manager", "gateway", or what a runner is to be called.
            *flags: besides those that it needs.
            failpoints: as in the variable.
        """
        shared = ["--runtime-dir", str(self.runtime_dir.path), *flags]
        match name:
            case "manager":
                args = ["cache_manager", "--pool-size", self._pool_size, "--admin-listen", self.admin]
            case "gateway":
                args = ["gateway", "--model", str(self._model), "--listen", self.gateway]
            case _:
                args = ["model_runner", "--model", str(self._model), "--name", name]
        process = self._processes[name] = await asyncio.create_subprocess_exec(
            *command(*args, *shared),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=_LONGEST_LINE,
            env=os.environ | self._environment | {VARIABLE: failpoints},
            process_group=0,
        )
        self._ready[name] = asyncio.Event()
        reader = asyncio.create_task(self._read(name, process))
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)

    async def until_ready(self, name: str) -> None:
        """Wait until it says so.

        Raises:
            NoRecoveryError: it does not.
        """
        await _in_time(self._ready[name].wait(), f"the {name} is ready")

    def runs(self, name: str) -> bool:
        """Whether it was started and has not ended."""
        return name in self._processes and self._processes[name].returncode is None

    async def kill(self, name: str) -> None:
        """SIGKILL, if it runs, and wait for its end."""
        if self.runs(name):
            self._processes[name].kill()
            await self._processes[name].wait()

    async def ended(self, name: str) -> int:
        """Wait until it ends by itself; returns its exit code.

        Raises:
            NoRecoveryError: it lives on.
        """
        return await _in_time(self._processes[name].wait(), f"the {name} ends")

    async def pause(self, name: str, seconds: float) -> None:
        """Wait until it stops itself, and let it go on after so many seconds.

        Raises:
            NoRecoveryError: it does not stop.
        """
        pid = self._processes[name].pid

        async def stopped() -> bool:
            return is_stopped(pid)

        with Process(pid) as process:
            await until(stopped, f"the {name} stops itself")
            await asyncio.sleep(seconds)
            process.send(signal.SIGCONT)

    async def stop(self) -> dict[str, int]:
        """SIGTERM to the gateway, then the runners, then the manager; returns the exit codes of those that ran.

        Raises:
            NoRecoveryError: one does not end.
        """
        order = sorted(self._processes, key=lambda name: (name == "manager", name != "gateway"))
        codes = {}
        for name in order:
            if self.runs(name):
                self._processes[name].terminate()
                codes[name] = await self.ended(name)
        return codes

    async def _read(self, name: str, process: asyncio.subprocess.Process) -> None:
        """Keep the log, and find in it when the process is ready and where it listens."""
        if process.stdout is None:
            return
        while line := await process.stdout.readline():
            self._file.write(line)
            self._file.flush()
            with contextlib.suppress(ValueError):
                match json.loads(line):
                    case {"event": "ready", **facts}:
                        self.gateway = str(facts.get("listen", self.gateway))
                        self.admin = str(facts.get("admin_listen", self.admin))
                        self._ready[name].set()
                    case {"event": "runner ready", "runner_id": str(runner_id)}:
                        self.met.add(runner_id.rpartition("-")[0])


async def _in_time(awaitable: Awaitable[T], what: str) -> T:
    try:
        return await asyncio.wait_for(awaitable, RECOVERY_LIMIT_S)
    except TimeoutError:
        raise NoRecoveryError(f"not within {RECOVERY_LIMIT_S:g} s: {what}") from None
