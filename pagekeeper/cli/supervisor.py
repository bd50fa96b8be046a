"""Keep one of our processes alive: restart it when it dies or hangs, let another take over from it, stop it in time."""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import structlog

from pagekeeper.cli.life import Life, Line
from pagekeeper.cli.pulse import Pulse, until_silent
from pagekeeper.common.sockets import RuntimeDir

log = structlog.get_logger()


class ChildFailedError(Exception):
    """A child ended before it was ever ready. `code` is its exit code, negative for a signal."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name} ended with code {code} before it was ready")
        self.name = name
        self.code = code


@dataclass(frozen=True)
class Program:
    """What a child is.

    Attributes:
        name: what people call it.
        module: what `python -m` runs.
        flags: its command line; a switch has no value.
        lock: the name that it holds in the runtime directory while it serves; empty if none.
        health: where it answers grpc.health.v1: an address, or the flag that has it.
        restart_after_s: least time from a death to the next start. A start takes a core for seconds, which whoever has
            taken over needs just then: on two cores it doubles the pause of the streams.
    """

    name: str
    module: str
    flags: dict[str, str | None]
    lock: str = ""
    health: str = ""
    restart_after_s: float = 0.0


class Backoff:
    """How long a restart waits: ever longer after lives that were not ready, otherwise no longer than it has to.

    Args:
        at_least_s: the shortest wait.
    """

    _FIRST_S = 0.1
    _LONGEST_S = 5.0
    # Even lives that were ready begin no faster than this, should each of them end at once.
    _SHORTEST_LIFE_S = 1.0

    def __init__(self, at_least_s: float = 0.0) -> None:
        self._at_least_s = at_least_s
        self._next_s = self._FIRST_S

    def delay_s(self, was_ready: bool, lived_s: float) -> float:
        """After a life of so many seconds."""
        if was_ready:
            self._next_s = self._FIRST_S
            return max(self._at_least_s, self._SHORTEST_LIFE_S - lived_s)
        delay_s, self._next_s = self._next_s, min(2 * self._next_s, self._LONGEST_S)
        return max(self._at_least_s, delay_s)


class Child:
    """One of our programs, kept alive.

    A child says that it is ready by a JSON log line whose event is "ready". The addresses in it replace those in
    `flags`, so a restart listens where the first start did, even if that had asked for any free port.

    Args:
        program: what to run.
        runtime_dir: where it holds its lock.
        relay: gets each line that the child writes.
        hang_limit_s: a child that answers nothing for so many seconds is killed; 0: none is.
        after: who has to be ready before this one starts.

    Attributes:
        ready: set when it was ready for the first time.
        flags: its command line as it is now.
    """

    def __init__(
        self,
        program: Program,
        runtime_dir: RuntimeDir,
        relay: Callable[[Line], None],
        hang_limit_s: float = 0.0,
        after: "Child | None" = None,
    ) -> None:
        self.name = program.name
        self.ready = asyncio.Event()
        self.flags = dict(program.flags)
        self._program = program
        self._runtime_dir = runtime_dir
        self._relay = relay
        self._hang_limit_s = hang_limit_s
        self._after = after
        self._life: Life | None = None
        self._successor: Life | None = None
        self._replacing = asyncio.Event()
        self._stopping = asyncio.Event()

    async def keep_alive(self) -> None:
        """Run the child, again each time it ends, until `stop`.

        Raises:
            ChildFailedError: it ended before it was ever ready: another try would end the same way.
        """
        if self._after is not None:
            await _first_of(self._after.ready.wait(), self._stopping.wait())
        backoff = Backoff(self._program.restart_after_s)
        while not self._stopping.is_set():
            life, self._successor = self._successor, None
            self._replacing.clear()
            self._life = life = life or await self._begin()
            code = await asyncio.shield(life.end)
            if self._stopping.is_set():
                return
            if not self.ready.is_set():
                raise ChildFailedError(self.name, code)
            if code:
                log.warning("child died", child=self.name, code=code)
            if self._successor is None:
                delay_s = backoff.delay_s(life.ready.done(), life.seconds)
                log.info("restarting, unless somebody serves in its place", child=self.name, delay_s=delay_s)
                await _first_of(self._until_free(delay_s), self._replacing.wait(), self._stopping.wait())

    async def replace(self, start_limit_s: float) -> bool:
        """Have a fresh process take over from the one that serves.

        It starts beside the old one, which serves until then, and afterwards if the new one fails.

        Args:
            start_limit_s: a new one that is not ready after so many seconds is killed.

        Returns:
            Whether the new one serves.
        """
        if not self.ready.is_set() or self._stopping.is_set() or self._successor is not None:
            return False
        successor = self._successor = await self._begin("--replace")
        self._replacing.set()
        await _first_of(successor.ready, successor.end, asyncio.sleep(start_limit_s))
        if successor.ready.done() or self._successor is not successor:
            return successor.ready.done()  # if the old one has died meanwhile, this one is its restart
        if not successor.end.done():
            log.error("the replacement does not become ready; killing it", child=self.name, start_limit_s=start_limit_s)
            successor.kill()
            await asyncio.shield(successor.end)
        if self._successor is successor:
            self._successor = None
        log.error("the replacement failed; the old one serves on", child=self.name, code=successor.end.result())
        return False

    async def stop(self, grace_s: float) -> bool:
        """End the child: SIGTERM, and SIGKILL after `grace_s` seconds. `keep_alive` returns.

        Returns:
            Whether it ended by itself.
        """
        self._stopping.set()
        lives = self._lives()
        for life in lives:
            life.terminate()
        _, late = await asyncio.wait([life.end for life in lives], timeout=grace_s) if lives else (set(), set())
        if late:
            log.error("child does not stop; killing it", child=self.name, grace_s=grace_s)
            self.kill()
            await asyncio.wait(late)
        return not late

    def kill(self) -> None:
        """End the child at once."""
        self._stopping.set()
        for life in self._lives():
            life.kill()

    def _lives(self) -> list[Life]:
        return [life for life in (self._life, self._successor) if life is not None]

    async def _begin(self, *switches: str) -> Life:
        life = await Life.begin(self._program.module, self.flags | dict.fromkeys(switches), self._relay)
        life.ready.add_done_callback(lambda ready: self._note_ready(ready.result()))
        if self._stopping.is_set():
            life.terminate()
        if self._hang_limit_s:
            watch = asyncio.create_task(self._kill_if_it_hangs(life))
            life.end.add_done_callback(lambda _: watch.cancel())
        return life

    def _note_ready(self, event: dict[str, Any]) -> None:
        for flag in self.flags:
            address = event.get(flag.removeprefix("--").replace("-", "_"))
            if flag.endswith("listen") and address:
                self.flags[flag] = address
        self.ready.set()

    async def _kill_if_it_hangs(self, life: Life) -> None:
        health = self._program.health
        pulse = Pulse(life.pid, lambda: self.flags.get(health, health) if life.ready.done() else None)
        try:
            await until_silent(pulse.ask, self._hang_limit_s)
        finally:
            await pulse.close()
        if not self._stopping.is_set():
            log.error("child hangs; killing it", child=self.name, pid=life.pid, hang_limit_s=self._hang_limit_s)
            life.kill()

    async def _until_free(self, delay_s: float) -> None:
        """Wait so long, and while another process serves under the name of this child: one that has taken over."""
        await asyncio.sleep(delay_s)
        if not self._program.lock:
            return
        loop = asyncio.get_running_loop()
        free = asyncio.Event()

        def wait() -> None:
            with contextlib.suppress(OSError):  # where there is no directory, nobody serves
                self._runtime_dir.wait_until_free(self._program.lock)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody wants to know any more
                loop.call_soon_threadsafe(free.set)

        # Nothing can end its wait for the kernel's lock; at `stop` it is left behind.
        threading.Thread(target=wait, name=f"wait for {self._program.lock}", daemon=True).start()
        await free.wait()


async def _first_of(*awaitables: Awaitable[object]) -> None:
    """Wait for the first; futures and tasks among them go on."""
    futures = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for future, awaitable in zip(futures, awaitables, strict=True):
            if future is not awaitable:
                future.cancel()
