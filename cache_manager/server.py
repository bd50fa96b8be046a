"""The cache manager's process: its sockets, its memory, and their order at start and end."""

import asyncio
import contextlib
import secrets
import signal
import time
from collections.abc import AsyncIterator

import grpc
import structlog
from grpc_channelz.v1 import channelz
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from cache_manager.admin import AdminService
from cache_manager.config import ManagerSettings
from cache_manager.event_feed import EventFeed
from cache_manager.handover import HandoverServer
from cache_manager.quarantine import Quarantine
from cache_manager.service import CacheService
from cache_manager.sessions import CachePolicy
from cache_manager.shared_pool import open_pool
from pagekeeper import __version__
from pagekeeper.common.errors import ConfigurationError
from pagekeeper.common.reflection import add_reflection
from pagekeeper.common.sockets import SERVER_OPTIONS, RuntimeDir, unix_target
from pagekeeper.v1 import admin_pb2_grpc, cache_pb2_grpc

_ADMIN_SERVICE = "pagekeeper.v1.AdminService"
_CHANNELZ = "grpc.channelz.v1.Channelz"
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_STOP_GRACE_SECONDS = 0.5
# A watcher whose machine has vanished is noticed by pings: nothing else would ever end its stream.
_ADMIN_OPTIONS = [*SERVER_OPTIONS, ("grpc.keepalive_time_ms", 30_000), ("grpc.keepalive_timeout_ms", 10_000)]

_log = structlog.get_logger()


async def serve(settings: ManagerSettings) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ConfigurationError: a directory, a port or the memory cannot be had.
    """
    for signal_number in _STOP_SIGNALS:
        signal.signal(signal_number, _end_at_once)
    runtime_dir = RuntimeDir(settings.runtime_dir)
    runtime_dir.prepare()
    runtime_dir.claim("cache-manager")

    async with contextlib.AsyncExitStack() as stack:
        pool = open_pool(settings)
        stack.callback(pool.close)
        stopped = asyncio.Event()
        for signal_number in _STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(signal_number, stopped.set)
        policy = CachePolicy(pool.size, settings.watermark)
        start_id = secrets.token_hex(8)
        quarantine = Quarantine(policy.settle, settings.settle_s)
        stack.callback(quarantine.close)
        service = CacheService(policy, pool, start_id, quarantine)
        await stack.enter_async_context(_cache_server(service, runtime_dir))
        handover = HandoverServer(runtime_dir.handover_socket, service)
        handover.start()
        stack.callback(handover.close)
        admin = AdminService(policy, EventFeed(policy), lambda: pool.backend, start_id, time.time(), __version__)
        admin_listen = await stack.enter_async_context(_admin_server(admin, settings.admin_listen))
        _log.info("ready", admin_listen=admin_listen, pool_bytes=pool.size, runtime_dir=str(runtime_dir.path))
        await stopped.wait()
        _log.info("stopping")


def _end_at_once(*_: object) -> None:
    """Before anything is served: to take the pool may need a minute, in which the event loop stands still.

    Raises:
        SystemExit: always, with exit code 0. It also ends the process that tries CUDA IPC.
    """
    raise SystemExit


@contextlib.asynccontextmanager
async def _cache_server(service: CacheService, runtime_dir: RuntimeDir) -> AsyncIterator[None]:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    cache_pb2_grpc.add_CacheServiceServicer_to_server(service, server)
    _listen(server, unix_target(runtime_dir.cache_socket), "runtime_dir")
    await server.start()
    try:
        yield
    finally:
        await server.stop(_STOP_GRACE_SECONDS)


@contextlib.asynccontextmanager
async def _admin_server(admin: AdminService, listen: str) -> AsyncIterator[str]:
    """Serve what operators see; yields the address in use. It outlives nothing: it stops first and says so."""
    server = grpc.aio.server(options=_ADMIN_OPTIONS)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    channelz.add_channelz_servicer(server)
    add_reflection(server, (_ADMIN_SERVICE, health.SERVICE_NAME, _CHANNELZ))
    port = _listen(server, listen, "admin_listen")
    for name in ("", _ADMIN_SERVICE):
        await health_servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    await server.start()
    try:
        yield f"{listen.rpartition(':')[0]}:{port}"
    finally:
        await health_servicer.enter_graceful_shutdown()
        await server.stop(_STOP_GRACE_SECONDS)


def _listen(server: grpc.aio.Server, address: str, setting: str) -> int:
    try:
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigurationError(f"{setting}: cannot listen on {address}; is it in use?") from error
