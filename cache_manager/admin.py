"""AdminService: statistics and audits for operators, on a port of its own."""

import asyncio

import grpc

from cache_manager.errors import unexpected_errors
from cache_manager.sessions import CachePolicy
from pagekeeper.v1 import admin_pb2 as pb
from pagekeeper.v1 import admin_pb2_grpc as pb_grpc


class AdminService(pb_grpc.AdminServiceServicer):
    """Answers whether or not a runner is alive.

    Args:
        policy: what is reported on.
        backend: how the pool's memory is named.
        started_at: seconds since the Unix epoch.
        version: of the program.
    """

    def __init__(self, policy: CachePolicy, backend: str, started_at: float, version: str) -> None:
        self._policy = policy
        self._backend = backend
        self._server = pb.ServerStats(started_at=started_at, version=version)

    async def GetStats(
        self,
        request: pb.GetStatsRequest,
        context: "grpc.aio.ServicerContext[pb.GetStatsRequest, pb.GetStatsResponse]",
    ) -> pb.GetStatsResponse:
        """Everything at one moment."""
        async with unexpected_errors(context):
            return self._stats()

    async def Audit(
        self,
        request: pb.AuditRequest,
        context: "grpc.aio.ServicerContext[pb.AuditRequest, pb.AuditResponse]",
    ) -> pb.AuditResponse:
        """Check every invariant; runners' messages are answered between two slices."""
        async with unexpected_errors(context):
            violations: list[str] = []
            for found in self._policy.audit():
                violations += found
                await asyncio.sleep(0)
            checked = max(0, self._policy.stats().pool.total_blocks - 1)
            return pb.AuditResponse(clean=not violations, violations=violations, checked_blocks=checked)

    def _stats(self) -> pb.GetStatsResponse:
        stats = self._policy.stats()
        pool, usage, counters = stats.pool, stats.usage, stats.counters
        return pb.GetStatsResponse(
            pool=pb.PoolStats(
                total_blocks=pool.total_blocks,
                free_blocks=pool.free_blocks,
                cached_blocks=pool.cached_blocks,
                leased_blocks=pool.leased_blocks,
                sealed_blocks=pool.sealed_blocks,
                quarantined_blocks=pool.quarantined_blocks,
                block_size=pool.block_size,
                block_bytes=pool.block_bytes,
                backend=self._backend,
            ),
            usage=pb.UsageStats(
                sequences=usage.sequences,
                logical_tokens=usage.logical_tokens,
                resident_tokens=usage.resident_tokens,
                utilization=usage.utilization,
                logical_blocks=usage.logical_blocks,
                physical_blocks=usage.physical_blocks,
                sharing_saved=usage.sharing_saved,
            ),
            prefix=pb.PrefixStats(
                lookups=counters.lookups,
                reopens=counters.reopens,
                queried_tokens=counters.queried_tokens,
                hit_tokens=counters.hit_tokens,
                evictions=counters.evictions,
            ),
            ops=pb.OperationStats(
                forks=counters.forks,
                copy_on_write=counters.copy_on_write,
                seals=counters.seals,
                folds=counters.folds,
                shortages=counters.shortages,
            ),
            sessions=[
                pb.SessionStats(
                    epoch=session.epoch,
                    runner_id=session.runner_id,
                    pid=session.pid,
                    state=session.state,
                    attached_at=session.attached_at,
                )
                for session in stats.sessions
            ],
            server=self._server,
        )
