"""RunnerService: one bidirectional stream a gateway, one StepOutput a step.

The event loop translates between messages and sequences; it never waits for the engine, so a Pong shows that the
process lives while the EngineReport in it shows what the engine's thread is doing.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator

import grpc
import structlog

from model_runner.dispatch import Dispatch, Engine, Gateway, RunnerInfo
from model_runner.step import BeamsOutput, Output
from pagekeeper.v1 import runner_pb2, runner_pb2_grpc

log = structlog.get_logger()


class RunnerService(runner_pb2_grpc.RunnerServiceServicer):
    """Carries gateways' messages to and from `Dispatch`. Lives on one event loop.

    Attributes:
        retired: set when a successor has asked for this runner's end.
    """

    def __init__(self, info: RunnerInfo) -> None:
        self._info = info
        self._dispatch: Dispatch | None = None
        self._nothing_to_wait_for = asyncio.Event()
        self.retired = asyncio.Event()

    def start(self, engine: Engine) -> None:
        """Serve with this engine from now on."""
        self._dispatch = Dispatch(self._info, engine, self.hurry)

    @property
    def dispatch(self) -> Dispatch:
        """What the messages are for.

        Raises:
            RuntimeError: `start` was not called.
        """
        if self._dispatch is None:
            raise RuntimeError("the service has no engine yet")
        return self._dispatch

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, let gateways move the live ones or see them end here, then end every stream.

        Args:
            grace_s: longest time for that, in seconds; `hurry` cuts it short.
        """
        self.dispatch.drain()
        if not self.dispatch.is_idle:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._nothing_to_wait_for.wait(), grace_s)
        self.end()

    def end(self) -> None:
        """End every stream. Without a drain before, gateways count that as a loss of this runner."""
        self.dispatch.end()

    def hurry(self) -> None:
        """Whoever drains waits for live requests no longer."""
        self._nothing_to_wait_for.set()

    async def Retire(
        self,
        request: runner_pb2.RetireRequest,
        context: "grpc.aio.ServicerContext[runner_pb2.RetireRequest, runner_pb2.RetireResponse]",
    ) -> runner_pb2.RetireResponse:
        """A successor is ready."""
        log.info("a successor takes over")
        self.retired.set()
        self.hurry()
        return runner_pb2.RetireResponse()

    async def Serve(
        self,
        request_iterator: AsyncIterator[runner_pb2.ServeRequest],
        context: "grpc.aio.ServicerContext[runner_pb2.ServeRequest, runner_pb2.ServeResponse]",
    ) -> AsyncIterator[runner_pb2.ServeResponse]:
        """Carry one gateway's requests; the end of the stream cancels what is left of them."""
        outbox: asyncio.Queue[runner_pb2.ServeResponse | None] = asyncio.Queue()  # None ends the stream
        gateway = Gateway(outbox.put_nowait, lambda: outbox.put_nowait(None))
        self.dispatch.join(gateway)
        reader = asyncio.create_task(self._read(request_iterator, gateway))
        try:
            while (message := await outbox.get()) is not None:
                yield message
        finally:
            reader.cancel()
            self.dispatch.leave(gateway)

    async def _read(self, requests: AsyncIterator[runner_pb2.ServeRequest], gateway: Gateway) -> None:
        try:
            async for message in requests:
                if message.HasField("submit"):
                    self._submit(gateway, message)
                else:
                    self.dispatch.take(gateway, message)
        finally:
            gateway.close()

    def _submit(self, gateway: Gateway, message: runner_pb2.ServeRequest) -> None:
        """Submit; a fault of ours ends this request and no other."""
        submit = message.submit
        log.debug("request received", request_id=submit.request_id, tenant=submit.tenant, attempt=submit.attempt)
        try:
            self.dispatch.take(gateway, message)
        except Exception:
            error_id = uuid.uuid4().hex
            log.exception("submit failed", error_id=error_id, request_id=submit.request_id)
            self.dispatch.give_up(gateway, submit, error_id)

    def deliver(self, step: int, outputs: list[Output | BeamsOutput]) -> None:
        """Send a step's outputs to their gateways. Runs on the event loop."""
        self.dispatch.deliver(step, outputs)
