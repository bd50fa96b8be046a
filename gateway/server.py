"""The gateway process: one port with everything that clients call, and an orderly end."""

import asyncio

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from gateway.config import GatewaySettings
from gateway.errors import ErrorInterceptor
from gateway.model import load_model
from gateway.runner_client import RunnerClient
from gateway.service import GenerateService
from pagekeeper.common.errors import ConfigurationError
from pagekeeper.common.reflection import add_reflection
from pagekeeper.common.sockets import SERVER_OPTIONS, RuntimeDir
from pagekeeper.v1 import generate_pb2, generate_pb2_grpc, runner_pb2

_GENERATE = generate_pb2.DESCRIPTOR.services_by_name["GenerateService"].full_name
_RUNNERS = runner_pb2.DESCRIPTOR.services_by_name["RunnerService"].full_name
_HEALTH_INTERVAL_S = 0.1
# Above what admission takes, so that one client's excess is refused there and not queued silently by HTTP/2.
_SPARE_STREAMS = 64
# For the last messages of streams that the end of the grace has cut.
_STOP_S = 1.0

log = structlog.get_logger()


class Gateway:
    """Everything of the process but its signals.

    Args:
        settings: of the process.

    Attributes:
        address: where clients connect, once `started` is set.

    Raises:
        ConfigurationError: the model cannot be read.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        model = load_model(settings.model, settings.model_name)
        self._settings = settings
        self._runtime_dir = RuntimeDir(settings.runtime_dir)
        self._runners = RunnerClient(self._runtime_dir, settings.runner_wait_s)
        self._service = GenerateService(model, self._runners, settings)
        self._health = health.aio.HealthServicer()
        self.started = asyncio.Event()
        self.address = ""

    async def serve(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then drain.

        Raises:
            ConfigurationError: the runtime directory or the address cannot be used.
        """
        self._runtime_dir.prepare()
        server = self._build_server()
        self.address = _bind(server, self._settings.listen)
        await self._set_health(False, False)
        await server.start()
        async with asyncio.TaskGroup() as tasks:
            # One of them ending would be a fault, and ends the process.
            background = [
                tasks.create_task(self._runners.serve()),
                tasks.create_task(self._service.watch_readers()),
                tasks.create_task(self._report_health()),
            ]
            log.info("ready", listen=self.address)
            self.started.set()
            await stop.wait()
            log.info("draining", grace_s=self._settings.grace_s)
            await self._health.enter_graceful_shutdown()
            await self._service.drain(self._settings.grace_s)
            await server.stop(_STOP_S)
            for task in background:
                task.cancel()

    def _build_server(self) -> grpc.aio.Server:
        streams = self._settings.max_concurrent + self._settings.max_queue + _SPARE_STREAMS
        options = [*SERVER_OPTIONS, ("grpc.max_concurrent_streams", streams)]
        server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=options)
        generate_pb2_grpc.add_GenerateServiceServicer_to_server(self._service, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        add_reflection(server, (_GENERATE, health.SERVICE_NAME))
        return server

    async def _report_health(self) -> None:
        """Keep the health service true, until cancelled."""
        told = (False, False)
        while True:
            now = (self._runners.is_serving, self._runners.is_complete)
            if now != told:
                log.info("health changed", serving=now[0], complete=now[1])
                await self._set_health(*now)
                told = now
            await asyncio.sleep(_HEALTH_INTERVAL_S)

    async def _set_health(self, is_serving: bool, is_complete: bool) -> None:
        """Tell whether requests are answered, and, for whoever watches over the runners, whether none is missing."""
        response = health_pb2.HealthCheckResponse
        for name, well in ((health.OVERALL_HEALTH, is_serving), (_GENERATE, is_serving), (_RUNNERS, is_complete)):
            await self._health.set(name, response.SERVING if well else response.NOT_SERVING)


def _bind(server: grpc.aio.Server, listen: str) -> str:
    """Take the port; returns the address with the port that it is."""
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise ConfigurationError(f"listen: cannot listen on {listen}: is the port in use?") from error
    return f"{listen.rpartition(':')[0]}:{port}"
