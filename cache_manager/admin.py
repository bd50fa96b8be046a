"""AdminService: statistics, listings, audits and events for operators, on a port of its own.

Everything shares the event loop with the runners' messages. So whatever grows with the pool is answered in slices of a
few milliseconds, between which messages are applied; and a reader who does not read waits by himself.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeAlias

import grpc

from cache_manager import admin_wire as wire
from cache_manager.event_feed import EventFeed
from cache_manager.sessions import CachePolicy
from pagekeeper.common.errors import OverloadedError
from pagekeeper.common.rpc_errors import errors_as_status
from pagekeeper.v1 import admin_pb2 as pb
from pagekeeper.v1 import admin_pb2_grpc as pb_grpc

_MAX_WATCHERS = 32
_RETRY_AFTER_SECONDS = 10.0

# grpc's own class takes no parameters; only its stub has them.
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class AdminService(pb_grpc.AdminServiceServicer):
    """Answers whether or not a runner is alive.

    Args:
        policy: what is reported on.
        feed: of the policy's events.
        backend: how the pool's memory is named now.
        start_id: differs after every start of the manager.
        started_at: seconds since the Unix epoch.
        version: of the program.
    """

    def __init__(
        self,
        policy: CachePolicy,
        feed: EventFeed,
        backend: Callable[[], str],
        start_id: str,
        started_at: float,
        version: str,
    ) -> None:
        self._policy = policy
        self._feed = feed
        self._backend = backend
        self._start_id = start_id
        self._server = pb.ServerStats(started_at=started_at, version=version)
        self._num_watchers = 0

    async def GetStats(self, request: pb.GetStatsRequest, context: _Context) -> pb.GetStatsResponse:
        """Everything at one moment."""
        async with errors_as_status(context):
            return self._stats()

    async def WatchStats(
        self, request: pb.WatchStatsRequest, context: _Context
    ) -> AsyncIterator[pb.WatchStatsResponse]:
        """Everything at once, and again after each interval."""
        async with errors_as_status(context):
            interval = wire.interval_from_proto(request)
            with self._watching(context):
                while True:
                    yield pb.WatchStatsResponse(stats=self._stats())
                    await asyncio.sleep(interval)

    async def ListSessions(self, request: pb.ListSessionsRequest, context: _Context) -> pb.ListSessionsResponse:
        """The runners; there are few of them."""
        async with errors_as_status(context):
            return wire.sessions_to_proto(self._policy.sessions())

    async def ListSequences(
        self, request: pb.ListSequencesRequest, context: _Context
    ) -> AsyncIterator[pb.ListSequencesResponse]:
        """Every open sequence, or those of one session, which may have ended."""
        async with errors_as_status(context):
            for rows in self._policy.sequences():
                asked_for = [row for row in rows if request.epoch in (0, row[0])]
                response = wire.sequences_to_proto(asked_for, with_block_tables=request.with_block_tables)
                if asked_for:
                    yield response
                await asyncio.sleep(0)

    async def ListBlocks(
        self, request: pb.ListBlocksRequest, context: _Context
    ) -> AsyncIterator[pb.ListBlocksResponse]:
        """Every block in one of the states asked for."""
        async with errors_as_status(context):
            for blocks in self._policy.blocks(wire.states_from_proto(request)):
                response = wire.blocks_to_proto(blocks)
                if blocks:
                    yield response
                await asyncio.sleep(0)

    async def Audit(self, request: pb.AuditRequest, context: _Context) -> pb.AuditResponse:
        """Check every invariant."""
        async with errors_as_status(context):
            violations: list[str] = []
            for found in self._policy.audit():
                violations += found
                await asyncio.sleep(0)
            checked = max(0, self._policy.stats().pool.total_blocks - 1)
            return pb.AuditResponse(clean=not violations, violations=violations, checked_blocks=checked)

    async def Flush(self, request: pb.FlushRequest, context: _Context) -> pb.FlushResponse:
        """Drop what is cached now."""
        async with errors_as_status(context):
            flushed = 0
            for count in self._policy.flush():
                flushed += count
                await asyncio.sleep(0)
            return pb.FlushResponse(flushed_blocks=flushed)

    async def WatchEvents(
        self, request: pb.WatchEventsRequest, context: _Context
    ) -> AsyncIterator[pb.WatchEventsResponse]:
        """Where the numbers stand, then every change of what can be found by content."""
        async with errors_as_status(context):
            with self._watching(context) as release:
                watcher = release.enter_context(self._feed.watch())
                yield wire.events_to_proto(self._start_id, self._policy.stats().counters.events, [])
                while True:
                    events = await watcher.next_events()
                    yield wire.events_to_proto(self._start_id, events[-1].number, events)

    @contextlib.contextmanager
    def _watching(self, context: _Context) -> Iterator[contextlib.ExitStack]:
        """A place among the watchers, and a stack for what ends with it: with the block or with the call."""
        if self._num_watchers >= _MAX_WATCHERS:
            raise OverloadedError(f"{_MAX_WATCHERS} watchers are being served already", _RETRY_AFTER_SECONDS)
        self._num_watchers += 1
        with contextlib.ExitStack() as release:
            release.callback(self._leave)
            context.add_done_callback(lambda _: release.close())  # type: ignore[arg-type]  # the stub names no protocol
            yield release

    def _leave(self) -> None:
        self._num_watchers -= 1

    def _stats(self) -> pb.GetStatsResponse:
        return wire.stats_to_proto(self._policy.stats(), self._backend(), self._server)
