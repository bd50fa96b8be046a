"""`python -m model_runner`: load the model, attach to the cache manager, serve gateways until told to stop."""

import asyncio
import contextlib
import contextvars
import os
import signal
import threading
import time
import uuid
from pathlib import Path

import grpc
import structlog
import torch
from grpc_health.v1 import health, health_pb2_grpc

from cache_manager.client import CacheClient, CacheConnectionLost, Exchange
from model_runner.config import RunnerSettings
from model_runner.engine import Engine, StepCost
from model_runner.loading import Loaded, load
from model_runner.model.load import LoadedModel
from model_runner.scheduler import Scheduler, SchedulerLimits
from model_runner.service import RunnerInfo, RunnerService
from model_runner.step import BeamsOutput, Output
from pagekeeper.common.errors import ConfigurationError
from pagekeeper.common.logging import configure_logging
from pagekeeper.common.process import run_process
from pagekeeper.common.settings import load_settings
from pagekeeper.common.sockets import SERVER_OPTIONS, RuntimeDir, unix_target
from pagekeeper.v1 import runner_pb2_grpc

_STEP_BASE_S = 20.0
_SLOWEST_FLOPS = 5e9
"""A step that computes fewer operations a second than this, after its base time, counts as hung."""
_CONNECT_ATTEMPT_S = 2.0
_WATCHDOG_PERIOD_S = 0.5

log = structlog.get_logger()


class Manager:
    """Opens sessions with the cache manager, with what never changes over a runner's life."""

    def __init__(self, settings: RunnerSettings, runner_id: str, loaded: Loaded) -> None:
        self._runtime_dir = RuntimeDir(settings.runtime_dir)
        self._wait_s = settings.manager_wait_s
        self._runner_id = runner_id
        self._layout = loaded.layout
        self._fingerprint = loaded.fingerprint
        self._cuda = loaded.cuda
        self.stopping = threading.Event()

    def connect(self) -> Exchange:
        """Wait for a manager and attach.

        Raises:
            CacheConnectionLost: none came in time, or the runner is stopping.
            ConfigurationError: the manager refuses this model or layout.
        """
        deadline = time.monotonic() + self._wait_s
        while True:
            try:
                return CacheClient.connect(
                    self._runtime_dir, self._runner_id, self._layout, self._fingerprint, _CONNECT_ATTEMPT_S, self._cuda
                )
            except CacheConnectionLost:
                if time.monotonic() > deadline or self.stopping.is_set():
                    raise


def context_limit(settings: RunnerSettings, model: LoadedModel, exchange: Exchange) -> int:
    """Most tokens of prompt and answer together: a sequence of this length always fits an otherwise empty pool.

    Raises:
        ConfigurationError: the pool holds less than two tokens.
    """
    granted = exchange.granted
    fits = (granted.num_blocks - 1 - granted.watermark_blocks) * settings.block_size
    limit = min(fits, model.config.max_position_embeddings, settings.max_context_length or fits)
    if limit < 2:
        raise ConfigurationError(
            f"pool_size: {granted.num_blocks} blocks of {granted.block_bytes} bytes hold no sequence; raise --pool-size"
        )
    return limit


async def serve(settings: RunnerSettings) -> int:
    """Run until SIGTERM or SIGINT, or until the engine fails; returns the exit code."""
    torch.set_num_threads(settings.threads or os.cpu_count() or 1)
    runner_id = f"{settings.name}-{uuid.uuid4().hex[:8]}"
    structlog.contextvars.bind_contextvars(runner_id=runner_id)
    runtime_dir = RuntimeDir(settings.runtime_dir)
    runtime_dir.prepare()
    with runtime_dir.lock(f"runner-{settings.name}"):
        return await _serve(settings, runtime_dir, runner_id)


async def _serve(settings: RunnerSettings, runtime_dir: RuntimeDir, runner_id: str) -> int:
    loop = asyncio.get_running_loop()
    started = time.monotonic()
    loaded = await asyncio.to_thread(load, settings)
    model = loaded.model
    seconds = round(time.monotonic() - started, 2)
    facts = {"why_not_gpu": loaded.why_not_gpu} if loaded.why_not_gpu else {}
    log.info("model loaded", model=str(settings.model), device=str(loaded.device), seconds=seconds, **facts)
    manager = Manager(settings, runner_id, loaded)
    first = await asyncio.to_thread(manager.connect)
    info = RunnerInfo(
        runner_id=runner_id,
        model=settings.model_name or settings.model.resolve().name,
        vocab_size=model.config.vocab_size,
        max_context_length=context_limit(settings, model, first),
        block_size=settings.block_size,
        num_blocks=first.granted.num_blocks - 1 - first.granted.watermark_blocks,
        max_sequences=settings.max_sequences,
    )

    service = RunnerService(info)
    server, health_servicer = _server(service, runtime_dir.runner_socket(settings.name))
    sessions = [first]
    del first  # the engine closes it when its manager is lost; nobody else may keep its pool mapped

    def connect() -> Exchange:
        exchange = sessions.pop() if sessions else manager.connect()
        if context_limit(settings, model, exchange) < info.max_context_length:
            raise ConfigurationError("pool_size: the new cache manager's pool holds less; restart the runner")
        return exchange

    def deliver(step: int, outputs: list[Output | BeamsOutput]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed already while the process ends
            loop.call_soon_threadsafe(service.deliver, step, outputs)

    engine = Engine(
        Scheduler(SchedulerLimits(settings.block_size, settings.max_batch_tokens, settings.max_sequences)),
        loaded.open_device(settings, info.max_context_length),
        connect,
        deliver,
        StepCost(_STEP_BASE_S, 2 * model.num_parameters / _SLOWEST_FLOPS),
    )
    service.start(engine)
    engine_ended = loop.run_in_executor(None, contextvars.copy_context().run, engine.run)
    try:
        watch_over(engine)
        if not await asyncio.to_thread(engine.wait_until_attached):
            await engine_ended  # raises what ended it
            return 1
        await server.start()
        log.info("ready", runner=settings.name, max_context_length=info.max_context_length)

        # Until here a signal simply ends the process: there is nothing to drain.
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        engine_ended.add_done_callback(lambda _: stop.set())
        await stop.wait()
        failed = engine_ended.done()
        log.info("draining", engine_failed=failed)
        await health_servicer.enter_graceful_shutdown()
        await service.drain(0 if failed else settings.grace_s)
        await server.stop(grace=1.0)
    finally:
        engine.stop()
        manager.stopping.set()
    await engine_ended
    return 1 if failed else 0


def _server(service: RunnerService, socket: Path) -> tuple[grpc.aio.Server, health.aio.HealthServicer]:
    """What gateways and health checks connect to, bound but not started."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    runner_pb2_grpc.add_RunnerServiceServicer_to_server(service, server)
    # SERVING from the start: a step that hangs ends the process (see watch_over), so one that answers can serve.
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    try:
        server.add_insecure_port(unix_target(socket))
    except RuntimeError as error:
        raise ConfigurationError(f"runtime_dir: cannot listen on {socket}") from error
    return server, health_servicer


def watch_over(engine: Engine) -> None:
    """Start the watchdog: a step over its limit ends the process, since nothing else could give its blocks back."""

    def watch() -> None:
        while True:
            time.sleep(_WATCHDOG_PERIOD_S)
            report = engine.report()
            if report.hung:
                log.error("the step hangs; exiting", step=report.step, seconds=report.seconds)
                os._exit(1)

    threading.Thread(target=watch, name="watchdog", daemon=True).start()


def main() -> int:
    """Serve; returns the exit code."""
    settings = load_settings(RunnerSettings)
    configure_logging("runner", settings.log_level)
    return asyncio.run(serve(settings))


if __name__ == "__main__":
    run_process("runner", main)
