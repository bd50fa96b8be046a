"""How a runner takes the place of the running one of the same name."""

import asyncio
from pathlib import Path

import grpc
import structlog

from pagekeeper.common.errors import ConfigurationError, UnavailableError
from pagekeeper.common.sockets import RuntimeDir, unix_target
from pagekeeper.v1 import runner_pb2, runner_pb2_grpc

_RETIRE_TIMEOUT_S = 2.0
_RETRY_S = 0.2

log = structlog.get_logger()


async def take_over(runtime_dir: RuntimeDir, name: str, wait_s: float) -> None:
    """Have the runner called `name` retire, if there is one, and claim its name, which is free once it has ended.

    Args:
        runtime_dir: where both are.
        name: of the runner.
        wait_s: how long to wait for the end of the other one, in seconds.

    Raises:
        UnavailableError: it has not ended in time, or a third one takes over just now.
    """
    process = f"runner-{name}"
    with runtime_dir.succession(process):
        retiring = asyncio.create_task(_retire(runtime_dir.runner_socket(name)))
        try:
            await asyncio.to_thread(runtime_dir.claim, process, wait_s)
        except ConfigurationError as error:
            raise UnavailableError(
                f"replace: the running {process} has not ended within {wait_s:g} s; kill that process (SIGKILL), and "
                "start this one again"
            ) from error
        finally:
            retiring.cancel()
            await asyncio.wait([retiring])


async def _retire(socket: Path) -> None:
    """Ask until there is an answer. One that is about to serve, or to end, has none."""
    while True:
        try:
            async with grpc.aio.insecure_channel(unix_target(socket)) as channel:
                stub = runner_pb2_grpc.RunnerServiceStub(channel)
                await stub.Retire(runner_pb2.RetireRequest(), timeout=_RETIRE_TIMEOUT_S)
                return
        except grpc.aio.AioRpcError as error:
            log.debug("nobody retires yet", code=error.code().name, details=error.details())
        await asyncio.sleep(_RETRY_S)
