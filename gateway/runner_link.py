"""One stream to one runner, from the first try to connect until the runner is lost."""

import asyncio
from collections.abc import Callable
from typing import TypeAlias

import grpc
import structlog

from gateway.generation import Generation
from gateway.submission import to_submit
from pagekeeper.common.errors import BugError
from pagekeeper.common.sockets import CHANNEL_OPTIONS
from pagekeeper.v1 import runner_pb2, runner_pb2_grpc

_PING_INTERVAL_S = 0.5
# No Pong for 2 s. Pings are counted, not seconds, so that a gateway which itself was held up blames nobody.
_MAX_UNANSWERED_PINGS = 4
_MAX_MANAGER_WAIT_S = 2.0
# Each link tries for itself; gRPC would let it wait out the failures of the one before.
_OPTIONS = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]

Output: TypeAlias = runner_pb2.SequenceOutput | runner_pb2.PromptOutput | runner_pb2.BeamOutput
"""What a runner says of one request's newest or older attempt."""

_Call: TypeAlias = "grpc.aio.StreamStreamCall[runner_pb2.ServeRequest, runner_pb2.ServeResponse]"

log = structlog.get_logger()


class RunnerLink:
    """Carries generations to one runner and its outputs back.

    Args:
        target: the runner's address.
        on_ready: called once, when the runner has introduced itself and its engine is seen to be alive.
        on_output: called with every output, of whatever attempt and kind.

    Attributes:
        generations: those submitted here and not ended yet, by number.
        is_draining: the runner takes no more requests.
    """

    def __init__(
        self,
        target: str,
        on_ready: Callable[[runner_pb2.RunnerHello], None],
        on_output: Callable[["RunnerLink", Output], None],
    ) -> None:
        self._target = target
        self._on_ready = on_ready
        self._on_output = on_output
        self._outbox: asyncio.Queue[runner_pb2.ServeRequest] = asyncio.Queue()
        self._hello: runner_pb2.RunnerHello | None = None
        self._engine: runner_pb2.EngineReport | None = None
        self._unanswered_pings = 0
        self.generations: dict[int, Generation] = {}
        self.is_draining = False

    @property
    def was_ready(self) -> bool:
        """Whether the runner ever became ready: it introduced itself, and its engine was seen to be alive."""
        return self._engine is not None

    @property
    def is_ready(self) -> bool:
        """Whether requests may be submitted. A runner without its cache manager takes them, and serves them later."""
        return self.was_ready and not self.is_draining

    @property
    def is_serving(self) -> bool:
        """Whether a request submitted now would be answered now."""
        return self.is_ready and self._engine is not None and not _misses_manager(self._engine)

    def submit(self, generation: Generation) -> None:
        """Begin a new attempt of this generation here; nothing has changed if it cannot be put into a message."""
        submit = to_submit(generation, generation.attempt + 1)
        generation.attempt = submit.attempt
        self.generations[generation.number] = generation
        self._outbox.put_nowait(runner_pb2.ServeRequest(submit=submit))

    def cancel_candidate(self, number: int, candidate: int) -> None:
        """Stop one candidate of a generation if that is here."""
        if number in self.generations:
            cancel = runner_pb2.Cancel(request=number, candidates=[candidate])
            self._outbox.put_nowait(runner_pb2.ServeRequest(cancel=cancel))

    def cancel(self, number: int) -> None:
        """Stop a generation if it is here."""
        if self.generations.pop(number, None) is not None:
            self._outbox.put_nowait(runner_pb2.ServeRequest(cancel=runner_pb2.Cancel(request=number)))

    async def run(self) -> str:
        """Serve until the runner is lost; returns how."""
        async with grpc.aio.insecure_channel(self._target, options=_OPTIONS) as channel:
            call: _Call = runner_pb2_grpc.RunnerServiceStub(channel).Serve()
            # A stream that breaks under the writer breaks under the reader too, who knows why.
            writer = asyncio.create_task(self._write(call))
            judges = [asyncio.create_task(self._read(call)), asyncio.create_task(self._ping())]
            try:
                done, _ = await asyncio.wait(judges, return_when=asyncio.FIRST_COMPLETED)
                return done.pop().result()
            finally:
                for task in (writer, *judges):
                    task.cancel()
                call.cancel()
                await asyncio.gather(writer, *judges, return_exceptions=True)

    async def _write(self, call: "_Call") -> None:
        while True:
            await call.write(await self._outbox.get())

    async def _read(self, call: "_Call") -> str:
        try:
            async for response in call:
                if response.HasField("pong") and _is_hung(response.pong.engine):
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
                if not (response.hello.vocab_size and response.hello.max_context_length):
                    raise BugError("a runner without a vocabulary or a context")
                self._hello = response.hello
            case "pong":
                self._take_pong(response.pong)
            case "step":
                step = response.step
                # A prompt's log-probabilities come before its first token.
                outputs: list[Output] = [*step.prompts, *step.outputs, *step.beams]
                for output in outputs:
                    self._on_output(self, output)

    def _take_pong(self, pong: runner_pb2.Pong) -> None:
        if self._hello is None:
            raise BugError("the runner has not introduced itself")
        self._unanswered_pings = 0
        is_first = self._engine is None
        self._engine = pong.engine
        if is_first:
            self._on_ready(self._hello)

    async def _ping(self) -> str:
        nonce = 0
        while self._unanswered_pings < _MAX_UNANSWERED_PINGS:
            nonce += 1
            self._unanswered_pings += 1
            self._outbox.put_nowait(runner_pb2.ServeRequest(ping=runner_pb2.Ping(nonce=nonce)))
            await asyncio.sleep(_PING_INTERVAL_S)
        return f"no answer to {self._unanswered_pings} pings"


def _is_hung(engine: runner_pb2.EngineReport) -> bool:
    return engine.state == runner_pb2.EngineReport.STATE_IN_STEP and engine.seconds > engine.limit_seconds


def _misses_manager(engine: runner_pb2.EngineReport) -> bool:
    waits = engine.state == runner_pb2.EngineReport.STATE_WAITING_FOR_MANAGER
    return waits and engine.seconds > _MAX_MANAGER_WAIT_S
