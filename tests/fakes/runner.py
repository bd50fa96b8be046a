"""A RunnerService over a real Unix socket whose tokens are a pure function of seed, candidate, position and prompt."""

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

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


def seed_of(seed: int, candidate: int) -> int:
    """What `token_at` takes for a candidate; the first one's is the request's own."""
    return seed + 1_000_003 * candidate


def answer_of(seed: int, prompt: Sequence[int], num_tokens: int, candidate: int = 0) -> list[int]:
    """The first tokens of the answer that every fake runner gives."""
    return [token_at(seed_of(seed, candidate), position, prompt) for position in range(num_tokens)]


def logprobs_of(token_id: int, position: int, count: int) -> types_pb2.TokenLogprobs:
    """What every fake runner says of a token there; the least likely alternative is impossible."""
    return types_pb2.TokenLogprobs(
        token_id=token_id,
        logprob=-(position % 7) / 2,
        rank=1 + position % 7,
        top_token_ids=range(_FIRST_TOKEN, _FIRST_TOKEN + count),
        top_logprobs=[-float(index) for index in range(count - 1)] + [-math.inf] * (count > 0),
    )


def score_of(beam: int) -> float:
    """The score of every fake search's hypothesis and beam."""
    return -1.0 - beam


def idle() -> runner_pb2.EngineReport:
    """The report of an engine with nothing to do."""
    return runner_pb2.EngineReport(state=runner_pb2.EngineReport.STATE_IDLE)


@dataclass
class Script:
    """How a fake runner behaves; a test may change it at any time.

    Attributes:
        token: the token at (seed of the candidate, position, prompt).
        step_s: pause before each step, in seconds.
        tokens_per_step: made for each sequence at each step.
        is_paused: no steps are made.
        answers_pings: False: the process looks stopped.
        engine: the report in each Pong.
        refusal: the answer to each Submit.
        breaks_at: positions at which a sequence's stream breaks, each once.
        pauses_at: the position that no sequence goes beyond.
        last_reason: the finish reason of an answer that has all its tokens.
        num_missing_logprobs: left out of each list.
        role: what the runner says that it is meant for.
        is_standby: the same.
        context_length: the same.
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
    num_missing_logprobs: int = 0
    role: "runner_pb2.Role.ValueType" = runner_pb2.ROLE_BOTH
    is_standby: bool = False
    context_length: int = CONTEXT_LENGTH


class _BrokenError(Exception):
    """The script says that the stream breaks here."""


class FakeRunner(runner_pb2_grpc.RunnerServiceServicer):
    """Use as `async with FakeRunner(socket) as runner`.

    Attributes:
        script: how it behaves.
        submits: every Submit, in order.
        cancels: the request of every Cancel of a whole request, in order.
        cancelled_candidates: the request and candidate of every other Cancel, in order.
        live: Submits that are not ended, by gateway and request.
        streams: how many gateways have come.
    """

    def __init__(self, path: Path, script: Script | None = None) -> None:
        self._path = path
        self.script = script or Script()
        self.streams = 0
        self._outboxes: set[_Outbox] = set()
        self.submits: list[runner_pb2.Submit] = []
        self.cancels: list[int] = []
        self.cancelled_candidates: list[tuple[int, int]] = []
        self.live: dict[tuple[int, int], runner_pb2.Submit] = {}

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

    def drain(self) -> None:
        """Say to every gateway that no more is taken; what is live goes on here."""
        self.script.refusal = runner_pb2.Refusal(code=runner_pb2.Refusal.CODE_DRAINING)
        self.say(runner_pb2.ServeResponse(draining=runner_pb2.Draining()))

    async def retire(self) -> None:
        """Drain without a grace: end every stream in good order, and be gone."""
        self.drain()
        for outbox in self._outboxes:
            outbox.put_nowait(None)
        await self._server.stop(1.0)

    def say(self, response: runner_pb2.ServeResponse) -> None:
        """Send this to every gateway, whatever it is."""
        for outbox in self._outboxes:
            outbox.put_nowait(response)

    async def Serve(
        self, request_iterator: AsyncIterator[runner_pb2.ServeRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[runner_pb2.ServeResponse]:
        self.streams += 1
        live = _Live(self.streams)
        outbox: _Outbox = asyncio.Queue()
        self._outboxes.add(outbox)
        tasks = [
            asyncio.create_task(self._read(request_iterator, live, outbox)),
            asyncio.create_task(self._run_steps(live, outbox)),
        ]
        try:
            hello = runner_pb2.RunnerHello(
                runner_id=self._path.stem,
                model="fake",
                vocab_size=VOCAB_SIZE,
                max_context_length=self.script.context_length,
                block_size=16,
                role=self.script.role,
                standby=self.script.is_standby,
            )
            yield runner_pb2.ServeResponse(hello=hello)
            while not any(task.done() for task in tasks):
                message = asyncio.create_task(outbox.get())
                try:
                    await asyncio.wait([message, *tasks], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    message.cancel()
                if message.done():
                    response = message.result()
                    if response is None:
                        return
                    yield response
            await context.abort(grpc.StatusCode.UNAVAILABLE, "broken by the script")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._outboxes.remove(outbox)
            for request, _ in live:
                self.live.pop((live.stream, request), None)

    async def _read(
        self,
        requests: AsyncIterator[runner_pb2.ServeRequest],
        live: "_Live",
        outbox: "_Outbox",
    ) -> None:
        async for message in requests:
            match message.WhichOneof("message"):
                case "submit":
                    self._submit(message.submit, live, outbox)
                case "cancel":
                    self._cancel(message.cancel, live)
                case "ping" if self.script.answers_pings:
                    pong = runner_pb2.Pong(nonce=message.ping.nonce, engine=self.script.engine)
                    outbox.put_nowait(runner_pb2.ServeResponse(pong=pong))

    def _submit(
        self,
        submit: runner_pb2.Submit,
        live: "_Live",
        outbox: "_Outbox",
    ) -> None:
        self.submits.append(submit)
        if self.script.refusal is not None:
            output = runner_pb2.SequenceOutput(
                request=submit.request, attempt=submit.attempt, refusal=self.script.refusal
            )
            outbox.put_nowait(_step([output]))
            return
        for key in [key for key in live if key[0] == submit.request]:
            self._end(key, live)
        for candidate in submit.candidates:
            live[submit.request, candidate.index] = _Sequence(submit, candidate)
        self.live[live.stream, submit.request] = submit
        if submit.sampling.HasField("prompt_logprobs"):
            count = submit.sampling.prompt_logprobs
            tokens = list(enumerate(submit.prompt_token_ids))[1 + self.script.num_missing_logprobs :]
            prompt = runner_pb2.PromptOutput(
                request=submit.request,
                attempt=submit.attempt,
                logprobs=[logprobs_of(token_id, position, count) for position, token_id in tokens],
            )
            step = runner_pb2.StepOutput(step=1, prompts=[prompt])
            outbox.put_nowait(runner_pb2.ServeResponse(step=step))

    def _cancel(self, cancel: runner_pb2.Cancel, live: "_Live") -> None:
        if not cancel.candidates:
            self.cancels.append(cancel.request)
        self.cancelled_candidates += [(cancel.request, candidate) for candidate in cancel.candidates]
        for key in [key for key in live if key[0] == cancel.request]:
            if not cancel.candidates or key[1] in cancel.candidates:
                self._end(key, live)

    def _end(self, key: "_Key", live: "_Live") -> None:
        del live[key]
        request, _ = key
        if not any(request == other for other, _ in live):
            del self.live[live.stream, request]

    async def _run_steps(self, live: "_Live", outbox: "_Outbox") -> None:
        while True:
            await asyncio.sleep(self.script.step_s)
            if self.script.is_paused or not live:
                continue
            pauses_at = self.script.pauses_at
            moving = [sequence for sequence in live.values() if pauses_at is None or sequence.position < pauses_at]
            outputs = [self._step_of(sequence) for sequence in moving]
            outbox.put_nowait(_step(_but_unfinished_searches(outputs, moving), _beams(moving, self.script)))
            for output in outputs:
                if output.finish_reason:
                    self._end((output.request, output.candidate), live)
            reached = [sequence.position for sequence in live.values() if sequence.position in self.script.breaks_at]
            if reached:
                self.script.breaks_at.remove(reached[0])
                while not outbox.empty():
                    await asyncio.sleep(0)
                raise _BrokenError

    def _step_of(self, sequence: "_Sequence") -> runner_pb2.SequenceOutput:
        submit, sampling = sequence.submit, sequence.submit.sampling
        begin = 0 if sampling.HasField("beam_search") else sequence.position
        output = runner_pb2.SequenceOutput(
            request=submit.request, attempt=submit.attempt, candidate=sequence.index, position=begin
        )
        last = sequence.position + self.script.tokens_per_step
        sequence.position = begin
        while sequence.position < last:
            token_id = sequence.token(self.script)
            if token_id in sampling.stop_token_ids and sequence.position >= sampling.min_tokens:
                output.finish_reason = types_pb2.FINISH_REASON_STOP
            else:
                output.token_ids.append(token_id)
                if sampling.HasField("logprobs"):
                    output.logprobs.append(logprobs_of(token_id, sequence.position, sampling.logprobs))
                sequence.position += 1
                if sequence.position == sampling.max_tokens:
                    output.finish_reason = self.script.last_reason
            if output.finish_reason:
                output.usage.cached_tokens = 16
                output.usage.recomputed_tokens = sequence.num_resumed
                if sampling.HasField("beam_search"):
                    output.score = score_of(sequence.index)
                break
        del output.logprobs[: self.script.num_missing_logprobs]
        return output


_Key: TypeAlias = tuple[int, int]
"""Request and candidate."""

_Outbox: TypeAlias = "asyncio.Queue[runner_pb2.ServeResponse | None]"
"""None ends the stream."""


class _Live(dict["_Key", "_Sequence"]):
    """What one gateway has here."""

    def __init__(self, stream: int) -> None:
        super().__init__()
        self.stream = stream


class _Sequence:
    """A candidate on one stream and how far it is."""

    def __init__(self, submit: runner_pb2.Submit, candidate: runner_pb2.Submit.Candidate) -> None:
        self.submit = submit
        self.index = candidate.index
        self.num_resumed = self.position = len(candidate.generated_token_ids)

    def token(self, script: Script) -> int:
        seed = seed_of(self.submit.sampling.seed, self.index)
        return script.token(seed, self.position, self.submit.prompt_token_ids)


def _but_unfinished_searches(
    outputs: list[runner_pb2.SequenceOutput], sequences: list[_Sequence]
) -> list[runner_pb2.SequenceOutput]:
    return [
        output
        for output, sequence in zip(outputs, sequences, strict=True)
        if output.finish_reason or not sequence.submit.sampling.HasField("beam_search")
    ]


def _beams(sequences: list[_Sequence], script: Script) -> list[runner_pb2.BeamOutput]:
    """The beams of every search that wants them shown; as many as hypotheses, which is enough to tell them apart."""
    found: dict[int, runner_pb2.BeamOutput] = {}
    for sequence in sequences:
        submit = sequence.submit
        if submit.sampling.beam_search.intermediate and sequence.position < submit.sampling.max_tokens:
            seed = seed_of(submit.sampling.seed, sequence.index)
            token_ids = [script.token(seed, place, submit.prompt_token_ids) for place in range(sequence.position)]
            output = found.setdefault(
                submit.request, runner_pb2.BeamOutput(request=submit.request, attempt=submit.attempt)
            )
            output.beams.add(token_ids=token_ids, score=score_of(sequence.index))
    return list(found.values())


def _step(
    outputs: list[runner_pb2.SequenceOutput], beams: Sequence[runner_pb2.BeamOutput] = ()
) -> runner_pb2.ServeResponse:
    return runner_pb2.ServeResponse(step=runner_pb2.StepOutput(step=1, outputs=outputs, beams=beams))
