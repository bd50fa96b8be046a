"""The runner's process: what it is made of, and the order of its start and its end."""

import asyncio
import contextlib
import contextvars
import os
import signal
import threading
import time
import uuid
from typing import Any

import grpc
import structlog
import torch
from grpc_health.v1 import health, health_pb2_grpc

from model_runner.config import RunnerSettings
from model_runner.dispatch import RunnerInfo
from model_runner.engine import Engine, StepCost
from model_runner.loading import Loaded, load
from model_runner.manager import Manager
from model_runner.scheduler import Scheduler, SchedulerLimits
from model_runner.service import RunnerService
from model_runner.step import BeamsOutput, Output
from model_runner.submission import RequestLimits
from model_runner.succession import take_over
from pagekeeper.common.errors import ConfigurationError
from pagekeeper.common.sockets import SERVER_OPTIONS, RuntimeDir, unix_target
from pagekeeper.v1 import runner_pb2, runner_pb2_grpc

_STEP_BASE_S = 20.0
_SLOWEST_FLOPS = 5e9
"""A step that computes fewer operations a second than this, after its base time, counts as hung."""
_WATCHDOG_PERIOD_S = 0.5
_TAKE_OVER_S = 30.0
_STOP_GRACE_S = 0.3
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

log = structlog.get_logger()


async def serve(settings: RunnerSettings) -> int:
    """Run until SIGTERM, SIGINT, a successor, or until the engine fails; returns the exit code."""
    loop = asyncio.get_running_loop()
    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, os._exit, 0)  # there is nothing to drain yet
    torch.set_num_threads(settings.threads or os.cpu_count() or 1)
    runner_id = f"{settings.name}-{uuid.uuid4().hex[:8]}"
    structlog.contextvars.bind_contextvars(runner_id=runner_id)
    runtime_dir = RuntimeDir(settings.runtime_dir)
    runtime_dir.prepare()
    if not settings.replace:
        runtime_dir.claim(f"runner-{settings.name}")
    loaded = await _load(settings)
    manager = Manager(settings, runner_id, loaded)
    limits = await asyncio.to_thread(manager.promise)
    log.info("room for requests", max_context_length=limits.max_context_length, blocks=limits.num_blocks)
    service = RunnerService(_info(settings, runner_id, limits))
    engine = _engine(settings, loaded, manager, limits, service)
    service.start(engine)
    engine_ended = loop.run_in_executor(None, contextvars.copy_context().run, engine.run)
    try:
        watch_over(engine)
        if await asyncio.to_thread(engine.wait_until_attached):
            if settings.replace:
                await take_over(runtime_dir, settings.name, _TAKE_OVER_S)
            await _serve_until_told(settings, runtime_dir, service, engine_ended)
    finally:
        engine.stop()
        manager.stopping.set()
    await engine_ended  # raises what ended it
    return 0


async def _load(settings: RunnerSettings) -> Loaded:
    started = time.monotonic()
    loaded = await asyncio.to_thread(load, settings)
    seconds = round(time.monotonic() - started, 2)
    facts = {"why_not_gpu": loaded.why_not_gpu} if loaded.why_not_gpu else {}
    log.info("model loaded", model=str(settings.model), device=str(loaded.device), seconds=seconds, **facts)
    return loaded


def _info(settings: RunnerSettings, runner_id: str, limits: RequestLimits) -> RunnerInfo:
    return RunnerInfo(
        runner_id=runner_id,
        model=settings.model_name or settings.model.resolve().name,
        limits=limits,
        role=runner_pb2.Role.Value(f"ROLE_{settings.role.upper()}"),
        standby=settings.standby,
    )


def _engine(
    settings: RunnerSettings, loaded: Loaded, manager: Manager, limits: RequestLimits, service: RunnerService
) -> Engine:
    loop = asyncio.get_running_loop()

    def deliver(step: int, outputs: list[Output | BeamsOutput]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed already while the process ends
            loop.call_soon_threadsafe(service.deliver, step, outputs)

    return Engine(
        Scheduler(SchedulerLimits(settings.block_size, settings.max_batch_tokens, settings.max_sequences)),
        loaded.open_device(settings, limits.max_context_length),
        manager.connect,
        deliver,
        StepCost(_STEP_BASE_S, 2 * loaded.model.num_parameters / _SLOWEST_FLOPS),
    )


async def _serve_until_told(
    settings: RunnerSettings, runtime_dir: RuntimeDir, service: RunnerService, engine_ended: asyncio.Future[None]
) -> None:
    """Listen until a signal, a successor or the engine's end, then drain."""
    server, health_servicer = _server(service, runtime_dir, settings.name)
    signalled = asyncio.Event()
    for number in _STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, signalled.set)
    await server.start()
    log.info("ready", runner=settings.name, role=settings.role, standby=settings.standby)

    told = [asyncio.create_task(event.wait()) for event in (signalled, service.retired)]
    reasons: list[asyncio.Future[Any]] = [engine_ended, *told]
    await asyncio.wait(reasons, return_when=asyncio.FIRST_COMPLETED)
    for task in told:
        task.cancel()
    failed, retired = engine_ended.done(), service.retired.is_set()
    log.info("draining", engine_failed=failed, retired=retired)
    engine_ended.add_done_callback(lambda _: service.hurry())
    await health_servicer.enter_graceful_shutdown()
    if failed:
        # No drain: a request that ends one engine after the other must not look as if it had only been moved.
        service.end()
    else:
        await service.drain(0 if retired else settings.grace_s)
    await server.stop(_STOP_GRACE_S)


def _server(
    service: RunnerService, runtime_dir: RuntimeDir, name: str
) -> tuple[grpc.aio.Server, health.aio.HealthServicer]:
    """What gateways and health checks connect to, bound but not started."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    runner_pb2_grpc.add_RunnerServiceServicer_to_server(service, server)
    # SERVING from the start: a step that hangs ends the process (see watch_over), so one that answers can serve.
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    socket = runtime_dir.runner_socket(name)
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
