"""Whether a process that runs also answers: its own health service, asked again and again."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagekeeper.cli.processes import is_stopped

_ASKS = 5
_SERVING_POLL_S = 0.1
_SERVING_LIMIT_S = 2.0
_STOPPED_POLL_S = 0.05
_OPTIONS = [
    ("grpc.enable_http_proxy", 0),  # these processes are on this machine
    ("grpc.use_local_subchannel_pool", 1),  # nothing is remembered of a process that listened there before
]
_NO_ANSWER = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)


async def until_silent(ask: Callable[[float], Awaitable[bool]], limit_s: float) -> None:
    """Return when every ask of the last `limit_s` seconds has gone unanswered.

    Asks are counted, not seconds: whoever was stopped itself, or whose machine was suspended, has missed one of them.

    Args:
        ask: gets its own limit in seconds, and says whether an answer came.
        limit_s: above 0.
    """
    loop = asyncio.get_running_loop()
    period_s = limit_s / _ASKS
    unanswered = 0
    while unanswered < _ASKS:
        due = loop.time() + period_s
        unanswered = 0 if await ask(period_s) else unanswered + 1
        await asyncio.sleep(due - loop.time())


async def until_serving(address: str) -> None:
    """Return when the server at `address` says that it can serve."""
    async with _connect(address) as channel:
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                if await _is_serving(channel, _SERVING_LIMIT_S):
                    return
            await asyncio.sleep(_SERVING_POLL_S)


class Pulse:
    """Asks one process for its health, over one connection. Whatever it answers, it lives.

    A process that has never answered has the benefit of the doubt, since it may still start; but one that is stopped
    answers nothing, as the kernel knows.

    Args:
        pid: of the process.
        address: says where it answers, once that is known.
    """

    def __init__(self, pid: int, address: Callable[[], str | None]) -> None:
        self._pid = pid
        self._address = address
        self._channel: grpc.aio.Channel | None = None
        self._has_answered = False

    async def ask(self, limit_s: float) -> bool:
        """Whether it lives, as far as can be known within so many seconds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit_s
        # To look once is not enough: who is stopped and goes on again and again may be seen stopped each time.
        while is_stopped(self._pid):
            if loop.time() > deadline:
                return False
            await asyncio.sleep(_STOPPED_POLL_S)
        if self._channel is None:
            if (address := self._address()) is None:
                return True
            self._channel = _connect(address)
        try:
            await _is_serving(self._channel, max(deadline - loop.time(), _STOPPED_POLL_S))
        except grpc.aio.AioRpcError as error:
            if error.code() in _NO_ANSWER:
                return not self._has_answered
        self._has_answered = True
        return True

    async def close(self) -> None:
        """End the connection."""
        if self._channel is not None:
            await self._channel.close()


def _connect(address: str) -> grpc.aio.Channel:
    """To a listening address; whoever listens on all of them is reached by loopback."""
    host, _, port = address.rpartition(":")
    loopback = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)  # noqa: S104 - compared, not bound
    return grpc.aio.insecure_channel(f"{loopback}:{port}", _OPTIONS)


async def _is_serving(channel: grpc.aio.Channel, limit_s: float) -> bool:
    """What the server at the other end says of itself.

    Raises:
        grpc.aio.AioRpcError: nothing, in time.
    """
    # types-grpcio-health-checking leaves the stub's methods out
    answer = await health_pb2_grpc.HealthStub(channel).Check(  # type: ignore[attr-defined]
        health_pb2.HealthCheckRequest(), timeout=limit_s, wait_for_ready=True
    )
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
