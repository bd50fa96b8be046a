"""A RunnerService over a real Unix socket whose tokens are a pure function of seed, position and prompt."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from pagekeeper.common.sockets import SERVER_OPTIONS, unix_target
from pagekeeper.v1 import runner_pb2, runner_pb2_grpc, types_pb2

VOCAB_SIZE = 384
CONTEXT_LENGTH = 512
# Above the special tokens of tests.fakes.tokenizer, so that no token ends an answer by chance.
_FIRST_TOKEN = 3


def token_at(seed: int, position: int, prompt: Sequence[int]) -> int:
    """The token that every fake runner makes there."""
    key = f"{seed}/{position}/{list(prompt)}".encode()
    return _FIRST_TOKEN + int.from_bytes(hashlib.sha256(key).digest()[:4], "big") % (VOCAB_SIZE - _FIRST_TOKEN)


def answer_of(seed: int, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The first tokens of the answer that every fake runner gives."""
    return [token_at(seed, position, prompt) for position in range(num_tokens)]


def idle() -> runner_pb2.EngineReport:
    """The report of an engine with nothing to do."""
    return runner_pb2.EngineReport(state=runner_pb2.EngineReport.STATE_IDLE)


@dataclass
class Script:
    """How a fake runner behaves; a test may change it at any time.

    Attributes:
        token: the token at (seed, position, prompt).
        step_s: pause before each step, in seconds.
        tokens_per_step: made for each sequence at each step.
        is_paused: no steps are made.
        answers_pings: False: the process looks stopped.
        engine: the report in each Pong.
        refusal: the answer to each Submit.
        breaks_at: positions at which a sequence's stream breaks, each once.
        pauses_at: the position that no sequence goes beyond.
        last_reason: the finish reason of an answer that has all its tokens.
    """

    token: Callable[[int, int, Sequence[int]], int] = token_at
    step_s: float = 0.001
    tokens_per_step: int = 1
    is_paused: bool = False
    answers_pings: bool = True
    engine: runner_pb2.EngineReport = field(default_factory=idle)
    refusal: runner_pb2.Refusal | None = None
    breaks_at: list[int] = field(default_factory=list)
    pauses_at: int | None = None
    last_reason: int = types_pb2.FINISH_REASON_LENGTH


class _BrokenError(Exception):
    """The script says that the stream breaks here."""


class FakeRunner(runner_pb2_grpc.RunnerServiceServicer):
    """Use as `async with FakeRunner(socket) as runner`.

    Attributes:
        script: how it behaves.
        submits: every Submit, in order.
        cancels: the request of every Cancel, in order.
        live: Submits that are not ended, by request.
    """

    def __init__(self, path: Path, script: Script | None = None, context_length: int = CONTEXT_LENGTH) -> None:
        self._path = path
        self._context_length = context_length
        self.script = script or Script()
        self.submits: list[runner_pb2.Submit] = []
        self.cancels: list[int] = []
        self.live: dict[int, runner_pb2.Submit] = {}

    async def __aenter__(self) -> "FakeRunner":
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        runner_pb2_grpc.add_RunnerServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(unix_target(self._path))
        await self._server.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.die()

    async def die(self) -> None:
        """End as a killed process does: every stream breaks, and nobody listens any more."""
        await self._server.stop(None)

    async def Serve(
        self, request_iterator: AsyncIterator[runner_pb2.ServeRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[runner_pb2.ServeResponse]:
        live: dict[int, _Sequence] = {}
        outbox: asyncio.Queue[runner_pb2.ServeResponse] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._read(request_iterator, live, outbox)),
            asyncio.create_task(self._run_steps(live, outbox)),
        ]
        try:
            hello = runner_pb2.RunnerHello(
                runner_id=self._path.stem,
                model="fake",
                vocab_size=VOCAB_SIZE,
                max_context_length=self._context_length,
                block_size=16,
            )
            yield runner_pb2.ServeResponse(hello=hello)
            while not any(task.done() for task in tasks):
                message = asyncio.create_task(outbox.get())
                try:
                    await asyncio.wait([message, *tasks], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    message.cancel()
                if message.done():
                    yield message.result()
            await context.abort(grpc.StatusCode.UNAVAILABLE, "broken by the script")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for request in live:
                self.live.pop(request, None)

    async def _read(
        self,
        requests: AsyncIterator[runner_pb2.ServeRequest],
        live: "dict[int, _Sequence]",
        outbox: "asyncio.Queue[runner_pb2.ServeResponse]",
    ) -> None:
        async for message in requests:
            match message.WhichOneof("message"):
                case "submit":
                    self._submit(message.submit, live, outbox)
                case "cancel":
                    self.cancels.append(message.cancel.request)
                    live.pop(message.cancel.request, None)
                    self.live.pop(message.cancel.request, None)
                case "ping" if self.script.answers_pings:
                    pong = runner_pb2.Pong(nonce=message.ping.nonce, engine=self.script.engine)
                    outbox.put_nowait(runner_pb2.ServeResponse(pong=pong))

    def _submit(
        self,
        submit: runner_pb2.Submit,
        live: "dict[int, _Sequence]",
        outbox: "asyncio.Queue[runner_pb2.ServeResponse]",
    ) -> None:
        self.submits.append(submit)
        if self.script.refusal is not None:
            output = runner_pb2.SequenceOutput(
                request=submit.request, attempt=submit.attempt, refusal=self.script.refusal
            )
            outbox.put_nowait(_step([output]))
            return
        live[submit.request] = _Sequence(submit, len(submit.candidates[0].generated_token_ids))
        self.live[submit.request] = submit

    async def _run_steps(self, live: "dict[int, _Sequence]", outbox: "asyncio.Queue[runner_pb2.ServeResponse]") -> None:
        while True:
            await asyncio.sleep(self.script.step_s)
            if self.script.is_paused or not live:
                continue
            pauses_at = self.script.pauses_at
            moving = [sequence for sequence in live.values() if pauses_at is None or sequence.position < pauses_at]
            outputs = [self._step_of(sequence) for sequence in moving]
            outbox.put_nowait(_step(outputs))
            for output in outputs:
                if output.finish_reason:
                    del live[output.request]
                    del self.live[output.request]
            reached = [sequence.position for sequence in live.values() if sequence.position in self.script.breaks_at]
            if reached:
                self.script.breaks_at.remove(reached[0])
                while not outbox.empty():
                    await asyncio.sleep(0)
                raise _BrokenError

    def _step_of(self, sequence: "_Sequence") -> runner_pb2.SequenceOutput:
        submit = sequence.submit
        output = runner_pb2.SequenceOutput(
            request=submit.request, attempt=submit.attempt, candidate=0, position=sequence.position
        )
        for _ in range(self.script.tokens_per_step):
            token_id = self.script.token(submit.sampling.seed, sequence.position, submit.prompt_token_ids)
            if token_id in submit.sampling.stop_token_ids:
                output.finish_reason = types_pb2.FINISH_REASON_STOP
            else:
                output.token_ids.append(token_id)
                sequence.position += 1
                if sequence.position == submit.sampling.max_tokens:
                    output.finish_reason = self.script.last_reason
            if output.finish_reason:
                resumed = len(submit.candidates[0].generated_token_ids)
                output.usage.cached_tokens = 16
                output.usage.recomputed_tokens = resumed
                break
        return output


@dataclass
class _Sequence:
    """A request on one stream and how far it is."""

    submit: runner_pb2.Submit
    position: int


def _step(outputs: list[runner_pb2.SequenceOutput]) -> runner_pb2.ServeResponse:
    return runner_pb2.ServeResponse(step=runner_pb2.StepOutput(step=1, outputs=outputs))
