"""One gRPC stream to one runner: the edge of a `RunnerLink`."""

import asyncio
from collections.abc import Callable
from typing import TypeAlias

import grpc
import structlog

from gateway.liveness import PING_INTERVAL_S
from gateway.router import Router
from gateway.runner_link import RunnerLink, RunnerLostError
from pagekeeper.common.sockets import CHANNEL_OPTIONS
from pagekeeper.v1 import runner_pb2, runner_pb2_grpc

# Each stream tries for itself; gRPC would let it wait out the failures of the one before.
_OPTIONS = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]

_Call: TypeAlias = "grpc.aio.StreamStreamCall[runner_pb2.ServeRequest, runner_pb2.ServeResponse]"
_Outbox: TypeAlias = "asyncio.Queue[runner_pb2.ServeRequest]"

log = structlog.get_logger()


async def serve(target: str, router: Router, on_ready: Callable[[], None]) -> RunnerLink:
    """Connect to a runner and serve until it is lost.

    Args:
        target: its address.
        router: for the `RunnerLink`.
        on_ready: called when the runner is ready.

    Returns:
        The link, which says how far it came.
    """

    def note_ready(runner_id: str) -> None:
        log.info("runner ready", runner_id=runner_id, waiting=router.num_waiting)
        on_ready()

    outbox: _Outbox = asyncio.Queue()
    link = RunnerLink(router, outbox.put_nowait, note_ready)
    async with grpc.aio.insecure_channel(target, options=_OPTIONS) as channel:
        call: _Call = runner_pb2_grpc.RunnerServiceStub(channel).Serve()
        # A stream that breaks under the writer breaks under the reader too, who knows why.
        writer = asyncio.create_task(_write(call, outbox))
        judges = [asyncio.create_task(_read(call, link, target)), asyncio.create_task(_ping(link))]
        try:
            done, _ = await asyncio.wait(judges, return_when=asyncio.FIRST_COMPLETED)
            # Now, so that what was there goes on elsewhere while this stream is being closed.
            num_left = link.lose()
            _log_loss(link, target, done.pop().result(), num_left)
        finally:
            for task in (writer, *judges):
                task.cancel()
            call.cancel()
            await asyncio.gather(writer, *judges, return_exceptions=True)
    return link


def _log_loss(link: RunnerLink, target: str, reason: str, num_left: int) -> None:
    if link.is_draining:
        log.info("runner has left", target=target, reason=reason, live=num_left)
    elif link.was_ready:
        log.warning("runner lost", target=target, reason=reason, live=num_left)
    else:
        log.debug("runner not ready", target=target, reason=reason)


async def _write(call: _Call, outbox: _Outbox) -> None:
    while True:
        await call.write(await outbox.get())


async def _read(call: _Call, link: RunnerLink, target: str) -> str:
    """Until the runner is lost; returns why."""
    try:
        async for response in call:
            link.take(response)
    except RunnerLostError as lost:
        return str(lost)
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    except Exception as error:  # whatever one runner sends, the others and all clients live on
        log.error("wrong message from a runner", target=target, exc_info=error)
        return f"a wrong message: {type(error).__name__}"
    return "the runner ended the stream"


async def _ping(link: RunnerLink) -> str:
    """Until the runner is lost; returns why."""
    try:
        while True:
            link.ping()
            await asyncio.sleep(PING_INTERVAL_S)
    except RunnerLostError as lost:
        return str(lost)
