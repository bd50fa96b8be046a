"""`pagekeeper up`: all three processes under one supervisor, from nothing to SERVING and back to nothing.

It prints one line to standard output, when the gateway can serve; everything else is log, on standard error.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import Field
from structlog.dev import ConsoleRenderer
from structlog.processors import JSONRenderer

from pagekeeper.cli.demo_model import demo_model_path
from pagekeeper.cli.device import Device, choose_device
from pagekeeper.cli.machine import find_packages
from pagekeeper.cli.supervisor import Child, ChildFailedError
from pagekeeper.common.cuda_probe import probe_cuda
from pagekeeper.common.errors import ConfigurationError, PagekeeperError
from pagekeeper.common.logging import configure_logging
from pagekeeper.common.process import EXIT_CONFIGURATION
from pagekeeper.common.settings import Settings, load_settings
from pagekeeper.common.sockets import RuntimeDir

_HEALTH_POLL_S = 0.1
_HEALTH_LIMIT_S = 2.0
_LEVELS = ("debug", "info", "warning", "error")
_EXIT_INTERRUPTED = 130
# Beyond its own grace, or when there is nothing to drain.
_MARGIN_S = 2.0

log = structlog.get_logger()


class UpSettings(Settings):
    """Serve: run and supervise cache manager, runner and gateway. Their other settings: PAGEKEEPER_* variables."""

    runtime_dir: Path | None = Field(  # type: ignore[assignment]  # only here may it be left open
        None, description="Directory of the internal Unix sockets; unset: a fresh one, removed at the end."
    )
    model: Path | None = Field(None, description="Model directory or GGUF file; unset: the demo model.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where the model runs; auto: on a GPU if one can be used (see pagekeeper doctor)."
    )
    pool_size: str = Field("1GiB", description="Bytes of the KV cache, such as 512MiB or 4GiB.")
    pool_memory: str = Field("auto", description="How a GPU's pool is shared: cuda_ipc or cuda_vmm; auto: what works.")
    listen: str = Field("127.0.0.1:50051", description="Address of the gateway; port 0 takes any free one.")
    admin_listen: str = Field("127.0.0.1:50052", description="Address of the admin port; port 0 takes any free one.")
    start_limit_s: float = Field(600.0, gt=0, description="Give up when it does not serve after so many seconds.")
    grace_s: float = Field(30.0, ge=0, description="How long live requests may go on after SIGTERM, in seconds.")


def run(args: list[str]) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code.

    Raises:
        PagekeeperError: a setting is wrong, or the server did not come up.
    """
    settings = load_settings(UpSettings, args)
    configure_logging("up", settings.log_level)
    model = settings.model or _demo_model()
    if not model.exists():
        raise ConfigurationError(f"model: there is no {model}; give --model the path of a model directory or GGUF file")
    device = choose_device(settings.device, probe_cuda, find_packages)
    log.info("device chosen", device=device.name, reason=device.why)
    with _runtime_dir(settings.runtime_dir) as runtime_dir:
        RuntimeDir(runtime_dir).prepare()
        return asyncio.run(_Stack(settings, device, model, runtime_dir).serve())


def _demo_model() -> Path:
    model = demo_model_path()
    if not model.is_dir():
        raise ConfigurationError(
            f"model: the demo model is not in {model}; run `pagekeeper model fetch smollm2`, or give --model DIR"
        )
    return model


@contextlib.contextmanager
def _runtime_dir(path: Path | None) -> Iterator[Path]:
    """The given directory, or a fresh one with a path short enough for sockets, removed at the end."""
    if path is not None:
        yield path
        return
    fresh = Path(tempfile.mkdtemp(prefix="pagekeeper-", dir=os.environ.get("XDG_RUNTIME_DIR")))
    try:
        yield fresh
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


class _Stack:
    """The three processes of one server."""

    def __init__(self, settings: UpSettings, device: Device, model: Path, runtime_dir: Path) -> None:
        # Children log at least at info, where "ready" is; what is less severe than asked for is not passed on.
        level = "debug" if settings.log_level == "debug" else "info"
        shared = {"--runtime-dir": str(runtime_dir), "--log-level": level}
        serving = shared | {"--model": str(model), "--grace-s": str(settings.grace_s)}
        cache = shared | {
            "--device": device.name,
            "--pool-size": settings.pool_size,
            "--pool-memory": settings.pool_memory,
            "--admin-listen": settings.admin_listen,
        }
        self._settings = settings
        self._device = device
        self._model = model
        self._render = ConsoleRenderer() if sys.stderr.isatty() else JSONRenderer()
        self._manager = Child("cache-manager", "cache_manager", cache, self._relay)
        self._runner = Child("runner", "model_runner", serving | {"--device": device.name}, self._relay)
        self._gateway = Child("gateway", "gateway", serving | {"--listen": settings.listen}, self._relay)
        # In the order in which they stop: whoever serves another goes after it.
        self._children = (self._gateway, self._runner, self._manager)

    async def serve(self) -> int:
        """Start everything, serve until told to stop, stop everything; returns the exit code.

        Raises:
            PagekeeperError: the server did not come up.
        """
        stop = asyncio.Event()
        code = 0

        def on_signal(number: signal.Signals) -> None:
            nonlocal code
            if stop.is_set() and number is signal.SIGINT:  # a person who cannot wait
                code = _EXIT_INTERRUPTED
                for child in self._children:
                    child.kill()
            stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
        announced = asyncio.create_task(self._announce())
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(child.keep_alive()) for child in self._children]
        tasks += [announced, asyncio.create_task(stop.wait())]
        try:
            pending = set(tasks)
            while not stop.is_set():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        except ChildFailedError as failure:
            if failure.code != EXIT_CONFIGURATION:
                raise PagekeeperError(f"{failure}; its log says why") from failure
            code = EXIT_CONFIGURATION  # the child has said what to change
        finally:
            stop.set()
            served = announced.done() and not announced.exception()
            announced.cancel()
            for child in self._children:
                await child.stop(self._settings.grace_s + _MARGIN_S if served else _MARGIN_S)
            await asyncio.gather(*tasks, return_exceptions=True)
        return code

    async def _announce(self) -> None:
        """Wait until the gateway can serve, then say so on standard output."""
        limit_s = self._settings.start_limit_s
        try:
            async with asyncio.timeout(limit_s):
                for child in self._children:
                    await child.ready.wait()
                await _until_serving(self._gateway.flags["--listen"])
        except TimeoutError as error:
            late = [child.name for child in self._children if not child.ready.is_set()] or ["gateway"]
            raise PagekeeperError(f"not serving after {limit_s:g} s; see the log of: {', '.join(late)}") from error
        print(
            f"ready  grpc={self._gateway.flags['--listen']}  admin={self._manager.flags['--admin-listen']}"
            f"  model={self._model.resolve().name}  device={self._device.name}  pid={os.getpid()}",
            flush=True,
        )

    def _relay(self, line: str | dict[str, Any]) -> None:
        """Pass a child's line on to our standard error."""
        if isinstance(line, dict):
            if line.get("level") in _LEVELS[: _LEVELS.index(self._settings.log_level)]:
                return
            line = str(self._render(None, "", line))
        print(line, file=sys.stderr, flush=True)


async def _until_serving(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            with contextlib.suppress(grpc.RpcError):
                # types-grpcio-health-checking leaves the stub's methods out
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_HEALTH_LIMIT_S)  # type: ignore[attr-defined]
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            await asyncio.sleep(_HEALTH_POLL_S)
