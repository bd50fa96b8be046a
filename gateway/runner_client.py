"""Finds runners, keeps a link to each, and lets the router decide which generation goes where."""

import asyncio
import contextlib
import random
import time
from pathlib import Path

from gateway import runner_stream
from gateway.generation import Generation
from gateway.router import Router
from gateway.validation import Limits
from pagekeeper.common.errors import UnavailableError
from pagekeeper.common.sockets import RuntimeDir, unix_target

_INTERVAL_S = 0.2
_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 0.2


class RunnerClient:
    """The router's edge: sockets, time and an event loop.

    Args:
        runtime_dir: where runners' sockets appear.
        runner_wait_s: longest time a generation waits for a runner, or its runner for the cache manager; in seconds.
    """

    def __init__(self, runtime_dir: RuntimeDir, runner_wait_s: float) -> None:
        self._runtime_dir = runtime_dir
        self._runner_wait_s = runner_wait_s
        self._router = Router(runner_wait_s, time.monotonic)
        self._has_met_runner = asyncio.Event()
        # Sockets of runners that were ready and are gone without having said that they drain.
        self._missing: set[Path] = set()

    @property
    def is_serving(self) -> bool:
        """Whether some runner is alive and has its cache manager."""
        return self._router.is_serving

    @property
    def is_complete(self) -> bool:
        """Whether every runner that has been ready and did not end on purpose is alive and has its cache manager."""
        return self.is_serving and not self._missing and self._router.is_well

    @property
    def has_limits(self) -> bool:
        """Whether `limits` are known."""
        return self._router.limits is not None

    async def limits(self) -> Limits:
        """What every runner can take; known from the first one on.

        Raises:
            UnavailableError: no runner came within the wait limit.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._has_met_runner.wait(), self._runner_wait_s)
        if self._router.limits is None:
            raise UnavailableError(f"no runner became ready within {self._runner_wait_s:g} s")
        return self._router.limits

    def submit(self, generation: Generation) -> None:
        """Have the generation's stream filled until its last token, `cancel`, or failure. Raises nothing itself."""
        self._router.submit(generation)

    def cancel(self, generation: Generation) -> None:
        """Stop a generation, wherever it is; nothing happens if it has ended."""
        self._router.cancel(generation)

    def cancel_candidate(self, generation: Generation, candidate: int) -> None:
        """Stop one candidate, wherever its generation is; the others go on."""
        self._router.cancel_candidate(generation, candidate)

    async def serve(self) -> None:
        """Look for runners and keep the links to them, until cancelled."""
        known: dict[Path, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as tasks:
            while True:
                known = {path: task for path, task in known.items() if not task.done()}
                for path in self._runtime_dir.runner_sockets():
                    if path not in known:
                        known[path] = tasks.create_task(self._keep_link(path))
                self._router.tick()
                await asyncio.sleep(_INTERVAL_S)

    async def _keep_link(self, path: Path) -> None:
        """Connect to one runner's socket, again each time it is lost, as long as the socket exists."""
        backoff_s = _FIRST_BACKOFF_S
        while path in self._runtime_dir.runner_sockets():
            link = await runner_stream.serve(unix_target(path), self._router, lambda: self._note_ready(path))
            if link.was_ready:
                backoff_s = _FIRST_BACKOFF_S
                if not link.is_draining:
                    self._missing.add(path)
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)

    def _note_ready(self, path: Path) -> None:
        self._missing.discard(path)
        self._has_met_runner.set()
