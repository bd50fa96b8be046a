"""One stream to one runner, from the first try to connect until the runner is lost."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeAlias

import grpc
import structlog

from gateway.generation import Generation
from gateway.liveness import PING_INTERVAL_S, Liveness, has_manager, is_hung
from gateway.router import Router
from gateway.runner_wire import from_hello, to_beams, to_cache_use, to_error, to_submit, to_tokens
from pagekeeper.common.errors import BugError
from pagekeeper.common.failpoints import failpoint
from pagekeeper.common.sockets import CHANNEL_OPTIONS
from pagekeeper.v1 import runner_pb2, runner_pb2_grpc

# Each link tries for itself; gRPC would let it wait out the failures of the one before.
_OPTIONS = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]

_Call: TypeAlias = "grpc.aio.StreamStreamCall[runner_pb2.ServeRequest, runner_pb2.ServeResponse]"

log = structlog.get_logger()


class RunnerLink:
    """Carries the router's word to one runner, and tells the router what the runner does.

    Args:
        target: the runner's address.
        router: gets this link when the runner is ready, and is told when it is lost.
        on_ready: called once, after the router.

    Attributes:
        was_ready: the runner has introduced itself, and its engine was seen to be alive.
    """

    def __init__(self, target: str, router: Router, on_ready: Callable[[], None]) -> None:
        self._target = target
        self._router = router
        self._on_ready = on_ready
        self._outbox: asyncio.Queue[runner_pb2.ServeRequest] = asyncio.Queue()
        self._hello: runner_pb2.RunnerHello | None = None
        self._liveness = Liveness()
        self._is_draining = False
        self.was_ready = False

    def submit(self, generation: Generation, max_tokens: int) -> None:
        """Send the current attempt of a generation; raises if no message can hold it."""
        self._outbox.put_nowait(runner_pb2.ServeRequest(submit=to_submit(generation, max_tokens)))

    def cancel(self, number: int, candidates: Sequence[int] = ()) -> None:
        """Tell the runner to stop a request, or only these candidates of it."""
        cancel = runner_pb2.Cancel(request=number, candidates=candidates)
        self._outbox.put_nowait(runner_pb2.ServeRequest(cancel=cancel))

    async def run(self) -> None:
        """Serve until the runner is lost."""
        async with grpc.aio.insecure_channel(self._target, options=_OPTIONS) as channel:
            call: _Call = runner_pb2_grpc.RunnerServiceStub(channel).Serve()
            # A stream that breaks under the writer breaks under the reader too, who knows why.
            writer = asyncio.create_task(self._write(call))
            judges = [asyncio.create_task(self._read(call)), asyncio.create_task(self._ping())]
            try:
                done, _ = await asyncio.wait(judges, return_when=asyncio.FIRST_COMPLETED)
                # Now, so that what was there goes on elsewhere while this stream is being closed.
                self._log_end(done.pop().result(), self._router.lose(self))
            finally:
                for task in (writer, *judges):
                    task.cancel()
                call.cancel()
                await asyncio.gather(writer, *judges, return_exceptions=True)

    def _log_end(self, reason: str, num_left: int) -> None:
        if self._is_draining:
            log.info("runner has left", target=self._target, reason=reason, live=num_left)
        elif self.was_ready:
            log.warning("runner lost", target=self._target, reason=reason, live=num_left)
        else:
            log.debug("runner not ready", target=self._target, reason=reason)

    async def _write(self, call: "_Call") -> None:
        while True:
            await call.write(await self._outbox.get())

    async def _read(self, call: "_Call") -> str:
        try:
            async for response in call:
                if response.HasField("pong") and is_hung(response.pong.engine):
                    return f"step {response.pong.engine.step} hangs"
                self._take(response)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        except Exception as error:  # whatever one runner sends, the others and all clients live on
            log.error("wrong message from a runner", target=self._target, exc_info=error)
            return f"a wrong message: {type(error).__name__}"
        return "the runner ended the stream"

    def _take(self, response: runner_pb2.ServeResponse) -> None:
        match response.WhichOneof("message"):
            case "hello":
                self._hello = response.hello
            case "pong":
                self._take_pong(response.pong.engine)
            case "draining":
                self._is_draining = True
                self._router.drain(self)
            case "step":
                self._take_step(response.step)

    def _take_pong(self, engine: runner_pb2.EngineReport) -> None:
        if self._hello is None:
            raise BugError("the runner has not introduced itself")
        self._liveness.pong()
        if not self.was_ready:
            if self._is_draining:
                return  # it was on its way out when we came
            info = from_hello(self._hello)
            self.was_ready = True
            log.info("runner ready", runner_id=self._hello.runner_id, waiting=self._router.num_waiting)
            self._router.ready(self, info)
            self._on_ready()
        self._router.report(self, has_manager=has_manager(engine))

    def _take_step(self, step: runner_pb2.StepOutput) -> None:
        failpoint("gateway.after_tokens")
        # A prompt's log-probabilities come before its first token.
        for prompt in step.prompts:
            self._router.take_prompt_logprobs(self, prompt.request, prompt.attempt, prompt.logprobs)
        for output in step.outputs:
            if output.HasField("refusal"):
                self._router.refuse(self, output.request, output.attempt, to_error(output.refusal))
            else:
                tokens, use = to_tokens(output), to_cache_use(output)
                self._router.take_tokens(self, output.request, output.attempt, output.position, tokens, use)
        for search in step.beams:
            self._router.take_beams(self, search.request, search.attempt, to_beams(search))

    async def _ping(self) -> str:
        nonce = 0
        while not self._liveness.is_lost:
            nonce += 1
            self._liveness.ping()
            self._outbox.put_nowait(runner_pb2.ServeRequest(ping=runner_pb2.Ping(nonce=nonce)))
            await asyncio.sleep(PING_INTERVAL_S)
        return f"no answer to {self._liveness.num_unanswered} pings"
