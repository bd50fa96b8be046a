"""The processes of one server: what each is told, and in which order they start, are replaced, and stop."""

import asyncio
import sys
from pathlib import Path

import structlog
from structlog.dev import ConsoleRenderer
from structlog.processors import JSONRenderer

from pagekeeper.cli.config import UpSettings
from pagekeeper.cli.life import Line
from pagekeeper.cli.pulse import until_serving
from pagekeeper.cli.supervisor import Child, Program
from pagekeeper.common.errors import PagekeeperError
from pagekeeper.common.logging import StandardError
from pagekeeper.common.sockets import RuntimeDir, unix_target

_LEVELS = ("debug", "info", "warning", "error")
# Beyond its own grace, or when there is nothing to drain.
_MARGIN_S = 2.0
# For a takeover by the other runner; with 16 streams on two cores it takes half of that.
_TAKEOVER_S = 1.0

log = structlog.get_logger()


class Stack:
    """Cache manager, runner, gateway, and the standby runner if there is to be one.

    Args:
        settings: of `up`.
        device: where the model runs, cpu or cuda.
        model: its path.
        runtime_dir: of their sockets.

    Attributes:
        has_served: whether it ever could.
    """

    def __init__(self, settings: UpSettings, device: str, model: Path, runtime_dir: RuntimeDir) -> None:
        # Children log at least at info, where "ready" is; what is less severe than asked for is not passed on.
        level = "debug" if settings.log_level == "debug" else "info"
        shared: dict[str, str | None] = {"--runtime-dir": str(runtime_dir.path), "--log-level": level}
        serving = shared | {"--model": str(model), "--grace-s": str(settings.grace_s)}
        cache = shared | {
            "--device": device,
            "--pool-size": settings.pool_size,
            "--pool-memory": settings.pool_memory,
            "--admin-listen": settings.admin_listen,
        }
        self._settings = settings
        self._device = device
        self._model = model.resolve().name
        self._runtime_dir = runtime_dir
        self._log = StandardError()
        self._render = ConsoleRenderer() if sys.stderr.isatty() else JSONRenderer()
        self.has_served = False
        self._manager = self._child(Program("cache-manager", "cache_manager", cache, "cache-manager", "--admin-listen"))
        self._runner = self._runner_child("runner", "0", serving | {"--no-standby": None})
        self._gateway = self._child(
            Program("gateway", "gateway", serving | {"--listen": settings.listen}, health="--listen")
        )
        # Beside the start of the first, that of a second would only be in its way.
        standby = self._runner_child("standby", "standby", serving | {"--standby": None}, after=self._runner)
        self._runners = (standby, self._runner) if settings.standby else (self._runner,)
        # In the order in which they stop: whoever serves another goes after it.
        self.children = (self._gateway, *self._runners, self._manager)

    def _runner_child(
        self, name: str, runner: str, serving: dict[str, str | None], after: Child | None = None
    ) -> Child:
        flags = serving | {"--device": self._device, "--name": runner}
        health = unix_target(self._runtime_dir.runner_socket(runner))
        restart_after_s = _TAKEOVER_S if self._settings.standby else 0.0
        return self._child(Program(name, "model_runner", flags, f"runner-{runner}", health, restart_after_s), after)

    def _child(self, program: Program, after: Child | None = None) -> Child:
        return Child(program, self._runtime_dir, self._relay, self._settings.hang_limit_s, after)

    async def until_serving(self) -> str:
        """Wait until the gateway can serve, and the standby can take over; returns what to say then.

        Raises:
            PagekeeperError: it takes too long.
        """
        limit_s = self._settings.start_limit_s
        try:
            async with asyncio.timeout(limit_s):
                for child in self.children:
                    await child.ready.wait()
                await until_serving(self._gateway.flags["--listen"] or "")
        except TimeoutError as error:
            late = [child.name for child in self.children if not child.ready.is_set()] or ["gateway"]
            raise PagekeeperError(f"not serving after {limit_s:g} s; see the log of: {', '.join(late)}") from error
        self.has_served = True
        grpc, admin = self._gateway.flags["--listen"], self._manager.flags["--admin-listen"]
        return f"grpc={grpc}  admin={admin}  model={self._model}  device={self._device}"

    async def replace_runners(self) -> None:
        """Put a fresh runner in the place of each, the standby first, so that live streams pause but a moment."""
        for runner in self._runners:
            log.info("replacing", child=runner.name)
            if not await runner.replace(self._settings.start_limit_s):
                return

    async def stop(self) -> bool:
        """Stop everything in order; returns whether all of it ended by itself within the grace."""
        grace_s = self._settings.grace_s + _MARGIN_S if self.has_served else _MARGIN_S
        return all([await child.stop(grace_s) for child in self.children])

    def kill(self) -> None:
        """End everything at once."""
        for child in self.children:
            child.kill()

    def _relay(self, line: Line) -> None:
        """Pass a child's line on to our standard error."""
        if isinstance(line, dict):
            if line.get("level") in _LEVELS[: _LEVELS.index(self._settings.log_level)]:
                return
            line = str(self._render(None, "", dict(line)))  # it takes from what it is given
        print(line, file=self._log, flush=True)
