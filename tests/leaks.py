"""A thousand requests that end in every way, through the real processes, and what they leave behind: nothing.

For a server of one's own, started with `environment`.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc

from pagekeeper.cli.server import Server
from pagekeeper.client import AdminClient
from pagekeeper.v1 import admin_pb2, admin_pb2_grpc, generate_pb2, generate_pb2_grpc, types_pb2
from tests import census
from tests.nothing_left import check_nothing_is_left

NUM_REQUESTS = 1000
NUM_WARM_UP = 800
"""Until oneDNN has met every number of rows that a step can have: after 200 requests it still grew by 20 MB, after 800
by 3."""
NUM_CLIENTS = 24
MEMORY_MARGIN = 16 << 20
LIMIT_S = 60.0
STALL_LIMIT_S = 60.0
"""Longest time in which nothing ends. How long all of it takes depends on what else this machine does."""
SETTLE_LIMIT_S = 40.0
"""gRPC's own threads come with load and go after 20 s of idleness."""
PROMPT = random.Random(0).choices(range(3, 384), k=256)


class Clients:
    """Ask, and end requests at every phase of their life: finished, cancelled, or with their connection lost."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.ends: Counter[str] = Counter()

    async def ask(self, num_requests: int, seed: int) -> None:
        """So many requests, `NUM_CLIENTS` at a time, while operators come and go."""
        rng = random.Random(seed)
        seeds = iter([rng.random() for _ in range(num_requests)])
        async with asyncio.timeout(STALL_LIMIT_S) as self._stall, asyncio.TaskGroup() as group:
            group.create_task(self._operate())
            for _ in range(NUM_CLIENTS):
                group.create_task(self._client(seeds))

    async def _client(self, seeds: Iterator[float]) -> None:
        channel = grpc.aio.insecure_channel(self._server.address)
        for seed in seeds:
            self._stall.reschedule(asyncio.get_running_loop().time() + STALL_LIMIT_S)
            rng = random.Random(seed)
            if rng.random() < 0.05:
                await self._lose_connection(channel, rng)
                channel = grpc.aio.insecure_channel(self._server.address)
            else:
                await self._request(channel, rng)
        await channel.close()

    async def _request(self, channel: grpc.aio.Channel, rng: random.Random) -> None:
        call = self._start(channel, rng)
        phase = rng.choice(["finished", "finished", "at once", "soon", "first token", "later"])
        self.ends[phase] += 1
        match phase:
            case "finished":
                async for _ in call:
                    pass
            case "soon":
                await asyncio.sleep(rng.random() * 0.05)
            case "first token":
                await call.read()
            case "later":
                for _ in range(rng.randrange(2, 8)):
                    await call.read()
        call.cancel()

    async def _lose_connection(self, channel: grpc.aio.Channel, rng: random.Random) -> None:
        calls = [self._start(channel, rng) for _ in range(3)]
        await calls[0].read()
        await channel.close()
        self.ends["connection lost"] += 1

    def _start(self, channel: grpc.aio.Channel, rng: random.Random) -> grpc.aio.UnaryStreamCall:
        shared = PROMPT[: rng.randrange(1, len(PROMPT))]
        own = rng.choices(range(3, 384), k=rng.randrange(32))
        sampling = types_pb2.SamplingParams(max_tokens=rng.randrange(1, 24), ignore_eos=True)
        request = generate_pb2.GenerateRequest(
            token_ids=generate_pb2.TokenIds(token_ids=shared + own), sampling=sampling, stream=True
        )
        return generate_pb2_grpc.GenerateServiceStub(channel).Generate(request, timeout=LIMIT_S)

    async def _operate(self) -> None:
        async with grpc.aio.insecure_channel(self._server.admin) as channel:
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            for _ in range(10):
                events = admin.WatchEvents(admin_pb2.WatchEventsRequest(), timeout=LIMIT_S)
                stats = admin.WatchStats(admin_pb2.WatchStatsRequest(interval_seconds=0.1), timeout=LIMIT_S)
                await stats.read()
                await stats.read()
                await events.read()
                await admin.Flush(admin_pb2.FlushRequest(), timeout=LIMIT_S)
                events.cancel()
                stats.cancel()


def environment(folder: Path) -> dict[str, str]:
    """Variables for the server.

    Steps are small, because oneDNN keeps what it has compiled for each number of rows: 512 of them are 200 MB. And
    fewer requests run than there are clients, so that some are cancelled in the gateway's queue.
    """
    small = {"PAGEKEEPER_THREADS": "1", "PAGEKEEPER_MAX_BATCH_TOKENS": "48", "PAGEKEEPER_MAX_CONCURRENT": "16"}
    return small | census.environment(folder)


def check_that_nothing_leaks(server: Server, folder: Path) -> Counter[str]:
    """Run the requests after a warm-up; returns how many of them ended in which way.

    Args:
        server: on the tiny model, with a pool too small for all clients at once.
        folder: where its processes put their counts.

    Raises:
        AssertionError: something is left.
    """
    clients = Clients(server)
    asyncio.run(clients.ask(NUM_WARM_UP, seed=1))
    check_nothing_is_left(server)
    pids = server.pids()
    before = census.take(pids, folder)
    with AdminClient(server.admin) as admin:
        sessions = [details["session"] for details in admin.sessions()]

    clients.ends.clear()
    asyncio.run(clients.ask(NUM_REQUESTS, seed=2))
    check_nothing_is_left(server)

    def left_over() -> dict[str, tuple[census.Census, census.Census]]:
        after = census.take(pids, folder)
        return {name: (before[name], after[name]) for name in pids if after[name].exceeds(before[name], MEMORY_MARGIN)}

    deadline = time.monotonic() + SETTLE_LIMIT_S
    while left := left_over():
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    with AdminClient(server.admin) as admin:
        assert [details["session"] for details in admin.sessions()] == sessions
        for details in admin.sessions():
            assert (details["sequences"], details["waiting_opens"], details["held_blocks"]) == (0, 0, 0)
    assert server.pids() == pids
    return clients.ends
