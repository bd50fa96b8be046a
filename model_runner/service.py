"""RunnerService: one bidirectional stream a gateway, one StepOutput a step.

The event loop translates between messages and sequences; it never waits for the engine, so a Pong shows that the
process lives while the EngineReport in it shows what the engine's thread is doing.
"""

import asyncio
import contextlib
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc
import structlog

from model_runner.engine import Engine
from model_runner.sequence import Sequence
from model_runner.step import BeamsOutput, Output
from model_runner.submission import RequestLimits, Submissions
from model_runner.wire import wire_beams, wire_hypotheses, wire_output, wire_prompt, wire_report
from pagekeeper.common.ids import SequenceId
from pagekeeper.v1 import runner_pb2, runner_pb2_grpc

log = structlog.get_logger()


@dataclass(frozen=True)
class RunnerInfo:
    """What a gateway is told first."""

    runner_id: str
    model: str
    limits: RequestLimits
    role: "runner_pb2.Role.ValueType"
    standby: bool

    def hello(self) -> runner_pb2.RunnerHello:
        """The same as a message."""
        return runner_pb2.RunnerHello(
            runner_id=self.runner_id,
            model=self.model,
            vocab_size=self.limits.vocab_size,
            max_context_length=self.limits.max_context_length,
            block_size=self.limits.block_size,
            role=self.role,
            standby=self.standby,
        )


@dataclass(eq=False)
class _Gateway:
    """One gateway's stream."""

    outbox: asyncio.Queue[runner_pb2.ServeResponse | None] = field(default_factory=asyncio.Queue)
    """None ends the stream."""
    sequences: dict[int, list[SequenceId]] = field(default_factory=dict)
    """Live sequences of each request of the newest attempt."""


@dataclass(frozen=True)
class _Origin:
    """Where the output of a sequence goes, or of a beam search, for which its leader stands."""

    gateway: _Gateway
    request: int
    attempt: int
    candidates: set[int]
    """Those that are still wanted: the sequence's own, or a search's hypotheses by their ranks."""


class RunnerService(runner_pb2_grpc.RunnerServiceServicer):
    """Submits what gateways send to the engine and routes each step's outputs back. Lives on one event loop.

    Attributes:
        retired: set when a successor has asked for this runner's end.
    """

    def __init__(self, info: RunnerInfo) -> None:
        self._info = info
        self._submissions = Submissions(info.limits)
        self._engine: Engine | None = None
        self._origins: dict[SequenceId, _Origin] = {}
        self._gateways: set[_Gateway] = set()
        self._is_draining = False
        self._nothing_to_wait_for = asyncio.Event()
        self._has_ended = False
        self.retired = asyncio.Event()

    def start(self, engine: Engine) -> None:
        """Serve with this engine from now on."""
        self._engine = engine

    @property
    def engine(self) -> Engine:
        """The engine.

        Raises:
            RuntimeError: `start` was not called.
        """
        if self._engine is None:
            raise RuntimeError("the service has no engine yet")
        return self._engine

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, let gateways move the live ones or see them end here, then end every stream.

        Args:
            grace_s: longest time for that, in seconds; `hurry` cuts it short.
        """
        self._is_draining = True
        for gateway in self._gateways:
            gateway.outbox.put_nowait(_draining())
        if self._origins:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._nothing_to_wait_for.wait(), grace_s)
        self.end()

    def end(self) -> None:
        """End every stream. Without a drain before, gateways count that as a loss of this runner."""
        self._is_draining = self._has_ended = True
        for gateway in self._gateways:
            gateway.outbox.put_nowait(None)

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
        gateway = _Gateway()
        gateway.outbox.put_nowait(runner_pb2.ServeResponse(hello=self._info.hello()))
        if self._is_draining:
            gateway.outbox.put_nowait(_draining())
        if self._has_ended:
            gateway.outbox.put_nowait(None)
        self._gateways.add(gateway)
        reader = asyncio.create_task(self._read(request_iterator, gateway))
        try:
            while (message := await gateway.outbox.get()) is not None:
                yield message
        finally:
            reader.cancel()
            self._gateways.discard(gateway)
            for request in list(gateway.sequences):
                self._cancel(gateway, request)

    async def _read(self, requests: AsyncIterator[runner_pb2.ServeRequest], gateway: _Gateway) -> None:
        try:
            async for message in requests:
                match message.WhichOneof("message"):
                    case "submit":
                        self._take(message.submit, gateway)
                    case "cancel":
                        self._cancel(gateway, message.cancel.request, frozenset(message.cancel.candidates))
                    case "ping":
                        pong = runner_pb2.Pong(nonce=message.ping.nonce, engine=wire_report(self.engine.report()))
                        gateway.outbox.put_nowait(runner_pb2.ServeResponse(pong=pong))
        finally:
            gateway.outbox.put_nowait(None)

    def _take(self, submit: runner_pb2.Submit, gateway: _Gateway) -> None:
        """Submit; a fault of ours ends this request and no other."""
        try:
            self._submit(submit, gateway)
        except Exception:
            error_id = uuid.uuid4().hex
            log.exception("submit failed", error_id=error_id, request_id=submit.request_id)
            self._cancel(gateway, submit.request)
            self._refuse(submit, gateway, runner_pb2.Refusal(code=runner_pb2.Refusal.CODE_INTERNAL, error_id=error_id))

    def _submit(self, submit: runner_pb2.Submit, gateway: _Gateway) -> None:
        self._cancel(gateway, submit.request)
        refusal = _too_late() if self._is_draining else self._submissions.refusal(submit)
        if refusal is not None:
            self._refuse(submit, gateway, refusal)
            return
        log.debug("request submitted", request_id=submit.request_id, tenant=submit.tenant, attempt=submit.attempt)
        if submit.sampling.HasField("beam_search"):
            sequences = self._submissions.beams(submit)
            ranks = {candidate.index for candidate in submit.candidates} or {0}
            self._expect(sequences[0], _Origin(gateway, submit.request, submit.attempt, ranks))
        else:
            sequences = self._submissions.candidates(submit)
            for sequence in sequences:
                self._expect(sequence, _Origin(gateway, submit.request, submit.attempt, {sequence.candidate}))
        self.engine.submit(*sequences)

    def _expect(self, sequence: Sequence, origin: _Origin) -> None:
        self._origins[sequence.id] = origin
        origin.gateway.sequences.setdefault(origin.request, []).append(sequence.id)

    def _refuse(self, submit: runner_pb2.Submit, gateway: _Gateway, refusal: runner_pb2.Refusal) -> None:
        output = runner_pb2.SequenceOutput(request=submit.request, attempt=submit.attempt, refusal=refusal)
        self._send(gateway, runner_pb2.StepOutput(outputs=[output]))

    def _cancel(self, gateway: _Gateway, request: int, candidates: frozenset[int] = frozenset()) -> None:
        """Cancel a request's `candidates`, all of them where none is named."""
        for sequence_id in list(gateway.sequences.get(request, [])):
            wanted = self._origins[sequence_id].candidates
            wanted -= candidates or set(wanted)
            if not wanted:
                self._end(gateway, request, sequence_id)
                self.engine.cancel(sequence_id)

    def deliver(self, step: int, outputs: list[Output | BeamsOutput]) -> None:
        """Send a step's outputs to their gateways, one message each. Runs on the event loop."""
        messages: dict[_Gateway, runner_pb2.StepOutput] = defaultdict(lambda: runner_pb2.StepOutput(step=step))
        for output in outputs:
            sequence = output.leader if isinstance(output, BeamsOutput) else output.sequence
            origin = self._origins.get(sequence.id)
            if origin is None:
                continue
            message = messages[origin.gateway]
            prompt = sequence.prompt_logprobs
            if prompt is not None and not prompt.is_sent:
                message.prompts.append(wire_prompt(prompt.found, origin.request, origin.attempt))
                prompt.is_sent = True
            if isinstance(output, Output):
                message.outputs.append(wire_output(output, origin.request, origin.attempt))
                ended = output.finish_reason is not None
            elif ended := output.ended:
                message.outputs.extend(wire_hypotheses(output, origin.request, origin.attempt, origin.candidates))
            else:
                message.beams.append(wire_beams(output, origin.request, origin.attempt))
            if ended:
                self._end(origin.gateway, origin.request, sequence.id)
        for gateway, message in messages.items():
            self._send(gateway, message)

    def _end(self, gateway: _Gateway, request: int, sequence_id: SequenceId) -> None:
        """Forget one sequence, and with its last one the request."""
        live = gateway.sequences[request]
        live.remove(sequence_id)
        if not live:
            del gateway.sequences[request]
        del self._origins[sequence_id]
        if self._is_draining and not self._origins:
            self.hurry()

    @staticmethod
    def _send(gateway: _Gateway, message: runner_pb2.StepOutput) -> None:
        gateway.outbox.put_nowait(runner_pb2.ServeResponse(step=message))


def _draining() -> runner_pb2.ServeResponse:
    return runner_pb2.ServeResponse(draining=runner_pb2.Draining())


def _too_late() -> runner_pb2.Refusal:
    return runner_pb2.Refusal(code=runner_pb2.Refusal.CODE_DRAINING, detail="the runner is shutting down")
