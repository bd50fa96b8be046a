"""CacheService: the edge between a runner's stream and the policy."""

import asyncio
import collections
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import structlog

from cache_manager import wire
from cache_manager.handover import RunnerConnection, Runners
from cache_manager.quarantine import Quarantine
from cache_manager.sessions import CachePolicy, ProtocolViolation
from cache_manager.shared_pool import SharedPool
from pagekeeper.common.errors import ConfigurationError
from pagekeeper.common.failpoints import failpoint
from pagekeeper.common.ids import Epoch
from pagekeeper.common.rpc_errors import errors_as_status
from pagekeeper.v1 import cache_pb2 as pb
from pagekeeper.v1 import cache_pb2_grpc as pb_grpc

_HELLO_SECONDS = 10.0

_log = structlog.get_logger()


class UnknownToken(Exception):
    """No living runner has this session token."""


@dataclass
class _Runner:
    connection: RunnerConnection
    epoch: Epoch | None = None
    """Its newest session."""


class CacheService(pb_grpc.CacheServiceServicer, Runners):
    """Carries sessions.

    A session belongs to a hand-over connection and not to a stream: a stream that breaks takes nothing away, and the
    end of the connection takes everything: at once, unless work that the runner has queued on a device may still write
    to the pool.

    Args:
        policy: decides.
        pool: its memory.
        start_id: differs after every start of the manager.
        quarantine: keeps what a dead runner's device work may still write.
    """

    def __init__(self, policy: CachePolicy, pool: SharedPool, start_id: str, quarantine: Quarantine) -> None:
        self._policy = policy
        self._pool = pool
        self._start_id = start_id
        self._quarantine = quarantine
        self._runners: dict[bytes, _Runner] = {}
        """By session token."""

    def descriptors_for(self, connection: RunnerConnection) -> list[int]:
        """What the runner needs to map the pool, which is made anew first where it must and nobody has it mapped."""
        if not self._policy.sessions() and self._pool.change_for(connection.pid):
            collections.deque(self._policy.flush(), maxlen=0)
        return self._pool.descriptors()

    def runner_connected(self, connection: RunnerConnection) -> None:
        """Its token is good from now on."""
        self._runners[connection.token] = _Runner(connection)

    def runner_ended(self, connection: RunnerConnection) -> None:
        """Its process can write no more: its session ends. What its device may still write is quarantined."""
        epoch = self._runners.pop(connection.token).epoch
        if epoch is None:
            return
        failpoint("manager.mid_release")
        outlived = self._pool.outlived_by_device_work and not connection.said_goodbye
        quarantined = self._policy.detach(epoch, quarantine=outlived)
        if quarantined:
            self._quarantine.hold(quarantined, connection.take_pidfd())
        _log.info("session ended", epoch=epoch, pid=connection.pid, quarantined=bool(quarantined))

    async def Attach(
        self,
        request_iterator: AsyncIterator[pb.AttachRequest],
        context: "grpc.aio.ServicerContext[pb.AttachRequest, pb.AttachResponse]",
    ) -> AsyncIterator[pb.AttachResponse]:
        """One session: hello and granted, then messages and results."""
        async with errors_as_status(context):
            try:
                async with asyncio.timeout(_HELLO_SECONDS):
                    hello = wire.hello_from_proto(await anext(request_iterator))
                granted = self._attach(hello)
                yield pb.AttachResponse(granted=granted)
                epoch = Epoch(granted.epoch)
                async for request in request_iterator:
                    failpoint("manager.before_apply")
                    message = wire.message_from_proto(request)
                    results = self._policy.apply(epoch, message)
                    failpoint("manager.after_apply")
                    yield wire.results_to_proto(message.number, results)
            except (StopAsyncIteration, TimeoutError):
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the stream brought no hello")
            except UnknownToken as error:
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
            except (ConfigurationError, ProtocolViolation) as error:
                _log.warning("refused a runner", reason=str(error))
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))

    def _attach(self, hello: pb.AttachHello) -> pb.AttachGranted:
        runner = self._runners.get(hello.session_token)
        if runner is None:
            raise UnknownToken("session_token: no living runner has it")
        layout = wire.layout_from_proto(hello.layout)
        memory = wire.memory_to_proto(self._pool.handle_for(runner.connection.pid))
        attachment = self._policy.attach(
            hello.runner_id,
            runner.connection.pid,
            layout,
            wire.fingerprint_from_proto(hello.fingerprint),
            now=time.time(),
            supersedes=runner.epoch,
        )
        runner.epoch = attachment.epoch
        failpoint("manager.mid_attach")
        if attachment.dropped_blocks:
            _log.warning("carved the pool anew, the cache is lost", cached_blocks=attachment.dropped_blocks)
        _log.info(
            "session attached",
            epoch=attachment.epoch,
            runner_id=hello.runner_id,
            pid=runner.connection.pid,
            num_blocks=attachment.num_blocks,
        )
        return pb.AttachGranted(
            epoch=attachment.epoch,
            start_id=self._start_id,
            num_blocks=attachment.num_blocks,
            block_bytes=layout.block_bytes,
            watermark_blocks=attachment.watermark_blocks,
            memory=memory,
        )
