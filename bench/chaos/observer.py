"""What can be seen of a running server: its health, its runners, and what its pool holds."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.chaos.figures import HealthAnswer, Opens
from pagekeeper.client import AdminClient
from pagekeeper.common.errors import PagekeeperError
from pagekeeper.v1 import runner_pb2

Answer = TypeVar("Answer")

POLL_S = 0.05
"""Between two questions for health."""
_HEALTH_TIMEOUT_S = 1.0
_RUNNERS = runner_pb2.DESCRIPTOR.services_by_name["RunnerService"].full_name
# A connection of its own, which tries again at once: what is measured is the server, not a client's backoff.
_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 100),
]


@dataclass(frozen=True)
class Runner:
    """An attached runner; `attached_at` by the monotonic clock."""

    name: str
    pid: int
    num_sequences: int
    attached_at: float


class Observer:
    """Asks the gateway for its health all the time, and the cache manager when told to.

    Args:
        gateway: address of the gateway.
        admin: address of the admin port.

    Attributes:
        answers: of the health service, in order.
    """

    def __init__(self, gateway: str, admin: str) -> None:
        self._gateway = gateway
        self._admin = admin
        self.answers: list[HealthAnswer] = []

    def serves_since(self, moment: float) -> bool:
        """Whether it was asked after that moment, and then served last, with no runner missing."""
        if not self.answers:
            return False
        last = self.answers[-1]
        return last.at > moment and bool(last.serving and last.complete)

    async def watch_health(self) -> None:
        """Ask until cancelled."""
        async with grpc.aio.insecure_channel(self._gateway, options=_OPTIONS) as channel:
            # types-grpcio-health-checking leaves the stub's methods out
            check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined]

            async def is_well(service: str) -> bool:
                answer = await check(health_pb2.HealthCheckRequest(service=service), timeout=_HEALTH_TIMEOUT_S)
                return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

            while True:
                try:
                    serving, complete = await asyncio.gather(is_well(""), is_well(_RUNNERS))
                    self.answers.append(HealthAnswer(time.monotonic(), serving, complete))
                except grpc.aio.AioRpcError:
                    self.answers.append(HealthAnswer(time.monotonic(), None, None))
                await asyncio.sleep(POLL_S)

    async def runners(self) -> list[Runner]:
        """Those attached, the one with the most sequences first; none while no manager answers."""
        try:
            sessions = await self._ask(AdminClient.sessions)
        except PagekeeperError:
            return []
        # The manager tells the time of day, which on one machine differs from our clock by a constant.
        offset = time.monotonic() - time.time()
        found: dict[int, Runner] = {}
        for info in sessions:
            session, count = info["session"], info["sequences"]
            # One that has just attached again has its old session, too, until its first message.
            older = found.get(session["pid"])
            found[session["pid"]] = Runner(
                name=session["runner_id"].rpartition("-")[0],
                pid=session["pid"],
                num_sequences=count + (older.num_sequences if older else 0),
                attached_at=session["attached_at"] + offset,
            )
        return sorted(found.values(), key=lambda runner: -runner.num_sequences)

    async def stats(self) -> dict[str, Any]:
        """As `AdminClient.stats`."""
        return await self._ask(AdminClient.stats)

    async def opens(self) -> Opens:
        """What the cache manager has counted since its start."""
        return Opens.of((await self.stats())["prefix"])

    async def flush(self) -> None:
        """As `AdminClient.flush`."""
        await self._ask(AdminClient.flush)

    async def audit(self) -> list[str]:
        """As `AdminClient.audit`."""
        return await self._ask(AdminClient.audit)

    async def _ask(self, question: Callable[[AdminClient], Answer]) -> Answer:
        # A connection for each question, so that none waits out the backoff of an earlier one.
        def ask() -> Answer:
            with AdminClient(self._admin) as admin:
                return question(admin)

        return await asyncio.to_thread(ask)
