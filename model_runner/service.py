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

from model_runner.beam_group import BeamGroup, most_blocks
from model_runner.beam_search import BeamSearch
from model_runner.engine import Engine
from model_runner.logprobs import PromptLogprobs
from model_runner.sampling_params import SamplingParams
from model_runner.sequence import Sequence
from model_runner.step import BeamsOutput, Output
from model_runner.wire import (
    beam_search_params,
    named_tokens,
    sampling_params,
    wire_beams,
    wire_hypotheses,
    wire_output,
    wire_prompt,
    wire_report,
)
from pagekeeper.common.ids import SequenceId
from pagekeeper.v1 import runner_pb2, runner_pb2_grpc

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
    num_blocks: int
    """Most blocks that one request may hold."""
    max_sequences: int
    """Most sequences that run at once."""


@dataclass(eq=False)
class _Gateway:
    """One gateway's stream."""

    outbox: asyncio.Queue[runner_pb2.ServeResponse | None] = field(default_factory=asyncio.Queue)
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
        refusal = self._refusal(submit)
        if refusal is not None:
            self._refuse(submit, gateway, refusal)
            return
        log.debug("request submitted", request_id=submit.request_id, tenant=submit.tenant, attempt=submit.attempt)
        candidates = submit.candidates or [runner_pb2.Submit.Candidate()]
        if submit.sampling.HasField("beam_search"):
            beams = self._beams(submit, len(candidates))
            self._expect(beams[0], _Origin(gateway, submit.request, submit.attempt, {c.index for c in candidates}))
            self.engine.submit(*beams)
            return
        params, prompt = sampling_params(submit.sampling), self._prompt_logprobs(submit)
        sequences = [self._sequence(submit, candidate, params, prompt) for candidate in candidates]
        for sequence in sequences:
            self._expect(sequence, _Origin(gateway, submit.request, submit.attempt, {sequence.candidate}))
        self.engine.submit(*sequences)

    def _expect(self, sequence: Sequence, origin: _Origin) -> None:
        self._origins[sequence.id] = origin
        origin.gateway.sequences.setdefault(origin.request, []).append(sequence.id)

    def _beams(self, submit: runner_pb2.Submit, num_hypotheses: int) -> list[Sequence]:
        """The sequences of a beam search."""
        params = beam_search_params(submit.sampling.beam_search, num_hypotheses)
        sampling, prompt = sampling_params(submit.sampling), self._prompt_logprobs(submit)
        empty = runner_pb2.Submit.Candidate()
        sequences = [self._sequence(submit, empty, sampling, prompt) for _ in range(params.width)]
        leader = sequences[0]
        max_tokens = leader.max_total_tokens - leader.num_prompt_tokens
        group = BeamGroup(BeamSearch(params, leader.sampling.stop_token_ids, max_tokens), sequences)
        for sequence in sequences:
            sequence.beams, sequence.num_continuations = group, group.search.num_continuations
        return sequences

    @staticmethod
    def _prompt_logprobs(submit: runner_pb2.Submit) -> PromptLogprobs | None:
        wanted = submit.sampling.HasField("prompt_logprobs")
        return PromptLogprobs(submit.sampling.prompt_logprobs, len(submit.prompt_token_ids) - 1) if wanted else None

    def _sequence(
        self,
        submit: runner_pb2.Submit,
        candidate: runner_pb2.Submit.Candidate,
        params: SamplingParams,
        prompt_logprobs: PromptLogprobs | None,
    ) -> Sequence:
        prompt, generated = list(submit.prompt_token_ids), list(candidate.generated_token_ids)
        return Sequence(
            id=SequenceId(next(self._ids)),
            tenant=submit.tenant,
            token_ids=prompt + generated,
            num_prompt_tokens=len(prompt),
            max_total_tokens=min(len(prompt) + submit.sampling.max_tokens, self._info.max_context_length),
            sampling=params,
            candidate=candidate.index,
            priority=submit.priority,
            num_resumed_tokens=len(generated),
            prompt_logprobs=prompt_logprobs,
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
        elif unknown := [name for name, token_id in named_tokens(submit.sampling) if token_id >= info.vocab_size]:
            field_, detail = f"sampling.{unknown[0]}", f"must be less than the vocabulary's size, {info.vocab_size}"
        elif detail := self._too_wide(submit):
            field_ = "sampling.beam_search.width"
        else:
            return None
        return runner_pb2.Refusal(code=runner_pb2.Refusal.CODE_INVALID, field=field_, detail=detail)

    def _too_wide(self, submit: runner_pb2.Submit) -> str:
        """Why a beam search can never run, if so: its beams do so together or not at all."""
        info, width, prompt = self._info, submit.sampling.beam_search.width, len(submit.prompt_token_ids)
        length = min(prompt + submit.sampling.max_tokens, info.max_context_length)
        needed = most_blocks(width, prompt, length, info.block_size)
        if width > info.max_sequences:
            return f"at most {info.max_sequences} sequences run at once"
        if width and needed > info.num_blocks:
            return f"{width} beams of {length} tokens may need {needed} blocks; the pool has {info.num_blocks}"
        return ""

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
        if self._drained is not None and not self._origins:
            self._drained.set()

    @staticmethod
    def _send(gateway: _Gateway, message: runner_pb2.StepOutput) -> None:
        gateway.outbox.put_nowait(runner_pb2.ServeResponse(step=message))
