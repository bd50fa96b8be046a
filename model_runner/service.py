"""RunnerService: one bidirectional stream a gateway, one StepOutput a step.

The event loop translates between messages and sequences; it never waits for the engine, so a Pong shows that the
process lives while the EngineReport in it shows what the engine's thread is doing.
"""

import asyncio
import contextlib
import itertools
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc
import structlog

from model_runner.engine import Engine
from model_runner.report import Activity, EngineReport
from model_runner.sequence import FinishReason, SamplingParams, Sequence
from model_runner.step import Output
from pagekeeper.common.ids import SequenceId
from pagekeeper.v1 import runner_pb2, runner_pb2_grpc, types_pb2

_FINISH = {
    None: types_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
}
_ACTIVITY = {
    Activity.IDLE: runner_pb2.EngineReport.STATE_IDLE,
    Activity.IN_STEP: runner_pb2.EngineReport.STATE_IN_STEP,
    Activity.WAITING_FOR_MANAGER: runner_pb2.EngineReport.STATE_WAITING_FOR_MANAGER,
}

_SAMPLING = frozenset({"temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "stop_token_ids"})
"""What of ResolvedSampling this runner can do."""

log = structlog.get_logger()


@dataclass(frozen=True)
class RunnerInfo:
    """What a gateway is told first."""

    runner_id: str
    model: str
    vocab_size: int
    max_context_length: int
    """Most tokens of prompt and answer together."""
    block_size: int


@dataclass(eq=False)
class _Gateway:
    """One gateway's stream."""

    outbox: asyncio.Queue[runner_pb2.ServeResponse | None] = field(default_factory=asyncio.Queue)
    sequences: dict[int, list[SequenceId]] = field(default_factory=dict)
    """Live sequences of each request of the newest attempt."""


@dataclass(frozen=True)
class _Origin:
    """Where a sequence's output goes."""

    gateway: _Gateway
    request: int
    attempt: int
    candidate: int


class RunnerService(runner_pb2_grpc.RunnerServiceServicer):
    """Submits what gateways send to the engine and routes each step's outputs back. Lives on one event loop."""

    def __init__(self, info: RunnerInfo) -> None:
        self._info = info
        self._engine: Engine | None = None
        self._ids = itertools.count(1)
        self._origins: dict[SequenceId, _Origin] = {}
        self._gateways: set[_Gateway] = set()
        self._drained: asyncio.Event | None = None

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
        """Refuse new requests, wait for the live ones as long as `grace_s`, then end every stream."""
        self._drained = asyncio.Event()
        if self._origins:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._drained.wait(), grace_s)
        for gateway in self._gateways:
            gateway.outbox.put_nowait(None)

    async def Serve(
        self,
        request_iterator: AsyncIterator[runner_pb2.ServeRequest],
        context: grpc.aio.ServicerContext[runner_pb2.ServeRequest, runner_pb2.ServeResponse],
    ) -> AsyncIterator[runner_pb2.ServeResponse]:
        """Carry one gateway's requests; the end of the stream cancels what is left of them."""
        gateway = _Gateway()
        self._gateways.add(gateway)
        info = self._info
        hello = runner_pb2.RunnerHello(
            runner_id=info.runner_id,
            model=info.model,
            vocab_size=info.vocab_size,
            max_context_length=info.max_context_length,
            block_size=info.block_size,
        )
        reader = asyncio.create_task(self._read(request_iterator, gateway))
        try:
            yield runner_pb2.ServeResponse(hello=hello)
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
                        pong = runner_pb2.Pong(nonce=message.ping.nonce, engine=_wire_report(self.engine.report()))
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
        refusal = self._refusal(submit)
        if refusal is not None:
            self._refuse(submit, gateway, refusal)
            return
        log.debug("request submitted", request_id=submit.request_id, tenant=submit.tenant, attempt=submit.attempt)
        for candidate in submit.candidates or [runner_pb2.Submit.Candidate()]:
            sequence = self._sequence(submit, candidate)
            self._origins[sequence.id] = _Origin(gateway, submit.request, submit.attempt, candidate.index)
            gateway.sequences.setdefault(submit.request, []).append(sequence.id)
            self.engine.submit(sequence)

    def _sequence(self, submit: runner_pb2.Submit, candidate: runner_pb2.Submit.Candidate) -> Sequence:
        prompt, generated = list(submit.prompt_token_ids), list(candidate.generated_token_ids)
        sampling = submit.sampling
        return Sequence(
            id=SequenceId(next(self._ids)),
            tenant=submit.tenant,
            token_ids=prompt + generated,
            num_prompt_tokens=len(prompt),
            max_total_tokens=min(len(prompt) + sampling.max_tokens, self._info.max_context_length),
            sampling=SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                seed=sampling.seed,
                stop_token_ids=frozenset(sampling.stop_token_ids),
            ),
            candidate=candidate.index,
            priority=submit.priority,
            num_resumed_tokens=len(generated),
            # The last known token's KV never exists before the token after it is sampled.
            was_computed=len(prompt) + len(generated) - 1 if generated else 0,
        )

    def _refusal(self, submit: runner_pb2.Submit) -> runner_pb2.Refusal | None:
        """The gateway checks requests against the same limits; this is the runner's own door."""
        if self._drained is not None:
            return runner_pb2.Refusal(code=runner_pb2.Refusal.CODE_DRAINING, detail="the runner is shutting down")
        info, prompt = self._info, len(submit.prompt_token_ids)
        longest = max((len(c.generated_token_ids) for c in submit.candidates), default=0)
        ids = itertools.chain(submit.prompt_token_ids, *(c.generated_token_ids for c in submit.candidates))
        if not prompt:
            field_, detail = "prompt", "the prompt is empty"
        elif prompt + longest >= info.max_context_length:
            field_, detail = "prompt", f"at most {info.max_context_length - 1} tokens fit before the next one"
        elif longest >= submit.sampling.max_tokens:
            field_, detail = "sampling.max_tokens", "must be more than the tokens generated already"
        elif max(ids) >= info.vocab_size:
            field_, detail = "token_ids", f"must be less than the vocabulary's size, {info.vocab_size}"
        elif unknown := [name.name for name, _ in submit.sampling.ListFields() if name.name not in _SAMPLING]:
            field_, detail = f"sampling.{unknown[0]}", "this runner does not offer it"
        else:
            return None
        return runner_pb2.Refusal(code=runner_pb2.Refusal.CODE_INVALID, field=field_, detail=detail)

    def _refuse(self, submit: runner_pb2.Submit, gateway: _Gateway, refusal: runner_pb2.Refusal) -> None:
        output = runner_pb2.SequenceOutput(request=submit.request, attempt=submit.attempt, refusal=refusal)
        self._send(gateway, 0, [output])

    def _cancel(self, gateway: _Gateway, request: int, candidates: frozenset[int] = frozenset()) -> None:
        """Cancel a request's `candidates`, all of them where none is named."""
        for sequence_id in list(gateway.sequences.get(request, [])):
            if not candidates or self._origins[sequence_id].candidate in candidates:
                self._end(gateway, request, sequence_id)
                self.engine.cancel(sequence_id)

    def deliver(self, step: int, outputs: list[Output]) -> None:
        """Send a step's outputs to their gateways, one message each. Runs on the event loop."""
        messages: dict[_Gateway, list[runner_pb2.SequenceOutput]] = defaultdict(list)
        for output in outputs:
            origin = self._origins.get(output.sequence.id)
            if origin is None:
                continue
            messages[origin.gateway].append(_wire_output(output, origin))
            if output.finish_reason is not None:
                self._end(origin.gateway, origin.request, output.sequence.id)
        for gateway, wire_outputs in messages.items():
            self._send(gateway, step, wire_outputs)

    def _end(self, gateway: _Gateway, request: int, sequence_id: SequenceId) -> None:
        """Forget one sequence, and with its last one the request."""
        live = gateway.sequences[request]
        live.remove(sequence_id)
        if not live:
            del gateway.sequences[request]
        del self._origins[sequence_id]
        if self._drained is not None and not self._origins:
            self._drained.set()

    @staticmethod
    def _send(gateway: _Gateway, step: int, outputs: list[runner_pb2.SequenceOutput]) -> None:
        gateway.outbox.put_nowait(runner_pb2.ServeResponse(step=runner_pb2.StepOutput(step=step, outputs=outputs)))


def _wire_output(output: Output, origin: _Origin) -> runner_pb2.SequenceOutput:
    sequence = output.sequence
    usage = None
    # At the first token too: the gateway may end the answer itself, at a stop string or when this runner is lost.
    if output.finish_reason is not None or output.position == sequence.num_resumed_tokens:
        usage = types_pb2.Usage(
            prompt_tokens=sequence.num_prompt_tokens,
            cached_tokens=sequence.num_cached_tokens or 0,
            resumed_tokens=sequence.num_resumed_tokens,
            recomputed_tokens=sequence.num_recomputed_tokens,
            # The engine may have gone on: the sequence itself can be longer by now.
            completion_tokens=output.position + (output.token_id is not None),
        )
    return runner_pb2.SequenceOutput(
        request=origin.request,
        attempt=origin.attempt,
        candidate=sequence.candidate,
        position=output.position,
        token_ids=[] if output.token_id is None else [output.token_id],
        finish_reason=_FINISH[output.finish_reason],
        usage=usage,
    )


def _wire_report(report: EngineReport) -> runner_pb2.EngineReport:
    return runner_pb2.EngineReport(
        state=_ACTIVITY[report.activity],
        step=report.step,
        seconds=report.seconds,
        limit_seconds=report.limit_seconds,
        running=report.running,
        waiting=report.waiting,
        step_seconds=report.step_seconds,
        manager_wait_seconds=report.manager_wait_seconds,
        preemptions=report.preemptions,
    )
