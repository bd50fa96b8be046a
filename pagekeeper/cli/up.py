"""`pagekeeper up`: all processes under one supervisor, from nothing to SERVING and back to nothing.

It prints one line to standard output, when the gateway can serve; everything else is log, on standard error.
"""

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import structlog

from pagekeeper.cli.config import UpSettings
from pagekeeper.cli.demo_model import demo_model_path
from pagekeeper.cli.device import choose_device
from pagekeeper.cli.fresh_dir import fresh_runtime_dir
from pagekeeper.cli.machine import find_packages
from pagekeeper.cli.stack import Stack
from pagekeeper.cli.supervisor import ChildFailedError
from pagekeeper.common.cuda_probe import probe_cuda
from pagekeeper.common.errors import ConfigurationError, PagekeeperError
from pagekeeper.common.logging import configure_logging
from pagekeeper.common.process import EXIT_CONFIGURATION, EXIT_FAILURE
from pagekeeper.common.settings import load_settings
from pagekeeper.common.sockets import RuntimeDir

_EXIT_INTERRUPTED = 130

log = structlog.get_logger()


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
    with contextlib.nullcontext(settings.runtime_dir) if settings.runtime_dir else fresh_runtime_dir() as path:
        runtime_dir = RuntimeDir(path)
        runtime_dir.prepare()
        return asyncio.run(_serve(settings, device.name, model, runtime_dir))


def _demo_model() -> Path:
    model = demo_model_path()
    if not model.is_dir():
        raise ConfigurationError(
            f"model: the demo model is not in {model}; run `pagekeeper model fetch smollm2`, or give --model DIR"
        )
    return model


async def _serve(settings: UpSettings, device: str, model: Path, runtime_dir: RuntimeDir) -> int:
    """Start everything, serve until told to stop, stop everything; returns the exit code.

    Raises:
        PagekeeperError: the server did not come up.
    """
    stack = Stack(settings, device, model, runtime_dir)
    orders = _Orders(stack)
    announced = asyncio.create_task(_announce(stack))
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(child.keep_alive()) for child in stack.children]
    tasks += [announced, asyncio.create_task(orders.stop.wait())]
    code = 0
    try:
        pending = set(tasks)
        while not orders.stop.is_set():
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    except ChildFailedError as failure:
        if failure.code != EXIT_CONFIGURATION:
            raise PagekeeperError(f"{failure}; its log says why") from failure
        code = EXIT_CONFIGURATION  # the child has said what to change
    finally:
        orders.stop.set()
        announced.cancel()
        if not await stack.stop() and stack.has_served:
            code = EXIT_FAILURE
        await asyncio.gather(*tasks, return_exceptions=True)
    return _EXIT_INTERRUPTED if orders.interrupted else code


async def _announce(stack: Stack) -> None:
    facts = await stack.until_serving()
    with contextlib.suppress(OSError):  # whoever reads may be gone by now
        print(f"ready  {facts}  pid={os.getpid()}", flush=True)


class _Orders:
    """What signals tell us: SIGTERM and SIGINT to stop, a second SIGINT to do it at once, SIGHUP to renew the runners.

    SIGHUP also comes when the terminal closes. Then it means to stop, unless we were started with nohup.

    Attributes:
        stop: set when it is time to stop.
        interrupted: whether a person could not wait for that.
    """

    def __init__(self, stack: Stack) -> None:
        self.stop = asyncio.Event()
        self.interrupted = False
        self._stack = stack
        self._had_terminal = _has_terminal()
        self._ends_with_terminal = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        self._shown = [stream.fileno() for stream in (sys.stdout, sys.stderr) if stream.isatty()]
        self._renewal: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_stop, number)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)

    def _on_stop(self, number: signal.Signals) -> None:
        if self.stop.is_set() and number is signal.SIGINT:
            self.interrupted = True
            self._stack.kill()
        self.stop.set()

    def _on_hangup(self) -> None:
        terminal_closed = self._had_terminal and not _has_terminal()
        if terminal_closed:
            self._had_terminal = False
            with Path(os.devnull).open("w") as nowhere:
                for descriptor in self._shown:  # to write there would be an error now
                    os.dup2(nowhere.fileno(), descriptor)
        if terminal_closed and self._ends_with_terminal:
            self.stop.set()
        elif not self._stack.has_served or (self._renewal is not None and not self._renewal.done()):
            log.warning("SIGHUP ignored: the runners are only just starting")
        else:
            self._renewal = asyncio.create_task(self._stack.replace_runners())


def _has_terminal() -> bool:
    """Whether we have a controlling terminal, still."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
