"""Whose request each sequence is: what gateways send becomes sequences, and what they make becomes messages.

It waits for nothing, and what it sends it hands to whoever carries the stream; so it needs no event loop.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from model_runner.report import EngineReport
from model_runner.sequence import Sequence
from model_runner.step import BeamsOutput, Output
from model_runner.submission import RequestLimits, Submissions
from model_runner.wire import wire_beams, wire_hypotheses, wire_output, wire_prompt, wire_report
from pagekeeper.common.ids import SequenceId
from pagekeeper.v1 import runner_pb2


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


class Engine(Protocol):
    """What the engine is asked for; it does it in its own time."""

    def submit(self, *sequences: Sequence) -> None:
        """Make these sequences' tokens."""

    def cancel(self, sequence_id: SequenceId) -> None:
        """Stop one; outputs of steps before may still come."""

    def report(self) -> EngineReport:
        """What it is doing."""


@dataclass(eq=False)
class Gateway:
    """One gateway's stream.

    Attributes:
        send: puts a message into it.
        close: ends it, behind what was sent.
        sequences: live ones of each request of the newest attempt.
    """

    send: Callable[[runner_pb2.ServeResponse], object]
    close: Callable[[], object]
    sequences: dict[int, list[SequenceId]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Origin:
    """Where the output of a sequence goes, or of a beam search, for which its leader stands."""

    gateway: Gateway
    request: int
    attempt: int
    candidates: set[int]
    """Those that are still wanted: the sequence's own, or a search's hypotheses by their ranks."""


class Dispatch:
    """Submits what gateways send to the engine and routes each step's outputs back.

    Args:
        info: for the gateways.
        engine: does the work.
        on_drained: is called when nothing is live any more while the runner drains.
    """

    def __init__(self, info: RunnerInfo, engine: Engine, on_drained: Callable[[], object]) -> None:
        self._info = info
        self._engine = engine
        self._on_drained = on_drained
        self._submissions = Submissions(info.limits)
        self._origins: dict[SequenceId, _Origin] = {}
        self._gateways: list[Gateway] = []
        self._is_draining = False
        self._has_ended = False

    @property
    def is_idle(self) -> bool:
        """Whether no request is live."""
        return not self._origins

    def join(self, gateway: Gateway) -> None:
        """A gateway comes."""
        self._gateways.append(gateway)
        gateway.send(runner_pb2.ServeResponse(hello=self._info.hello()))
        if self._is_draining:
            gateway.send(_draining())
        if self._has_ended:
            gateway.close()

    def leave(self, gateway: Gateway) -> None:
        """A gateway is gone, and with it what is left of its requests; once more does nothing."""
        if gateway in self._gateways:
            self._gateways.remove(gateway)
            for request in list(gateway.sequences):
                self._cancel(gateway, request)

    def drain(self) -> None:
        """Refuse new requests from now on, and let gateways move the live ones."""
        self._is_draining = True
        for gateway in self._gateways:
            gateway.send(_draining())

    def end(self) -> None:
        """End every stream. Without a drain before, gateways count that as a loss of this runner."""
        self._is_draining = self._has_ended = True
        for gateway in self._gateways.copy():
            gateway.close()

    def take(self, gateway: Gateway, message: runner_pb2.ServeRequest) -> None:
        """A gateway has sent something."""
        match message.WhichOneof("message"):
            case "submit":
                self._submit(gateway, message.submit)
            case "cancel":
                self._cancel(gateway, message.cancel.request, frozenset(message.cancel.candidates))
            case "ping":
                pong = runner_pb2.Pong(nonce=message.ping.nonce, engine=wire_report(self._engine.report()))
                gateway.send(runner_pb2.ServeResponse(pong=pong))

    def give_up(self, gateway: Gateway, submit: runner_pb2.Submit, error_id: str) -> None:
        """End a request that could not be submitted, by a fault of ours."""
        self._cancel(gateway, submit.request)
        self._refuse(gateway, submit, runner_pb2.Refusal(code=runner_pb2.Refusal.CODE_INTERNAL, error_id=error_id))

    def deliver(self, step: int, outputs: list[Output | BeamsOutput]) -> None:
        """Send a step's outputs to their gateways, one message each."""
        messages: dict[Gateway, runner_pb2.StepOutput] = defaultdict(lambda: runner_pb2.StepOutput(step=step))
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
            gateway.send(runner_pb2.ServeResponse(step=message))

    def _submit(self, gateway: Gateway, submit: runner_pb2.Submit) -> None:
        self._cancel(gateway, submit.request)
        refusal = _too_late() if self._is_draining else self._submissions.refusal(submit)
        if refusal is not None:
            self._refuse(gateway, submit, refusal)
            return
        if submit.sampling.HasField("beam_search"):
            sequences = self._submissions.beams(submit)
            ranks = {candidate.index for candidate in submit.candidates} or {0}
            self._expect(sequences[0], _Origin(gateway, submit.request, submit.attempt, ranks))
        else:
            sequences = self._submissions.candidates(submit)
            for sequence in sequences:
                self._expect(sequence, _Origin(gateway, submit.request, submit.attempt, {sequence.candidate}))
        self._engine.submit(*sequences)

    def _expect(self, sequence: Sequence, origin: _Origin) -> None:
        self._origins[sequence.id] = origin
        origin.gateway.sequences.setdefault(origin.request, []).append(sequence.id)

    def _refuse(self, gateway: Gateway, submit: runner_pb2.Submit, refusal: runner_pb2.Refusal) -> None:
        output = runner_pb2.SequenceOutput(request=submit.request, attempt=submit.attempt, refusal=refusal)
        gateway.send(runner_pb2.ServeResponse(step=runner_pb2.StepOutput(outputs=[output])))

    def _cancel(self, gateway: Gateway, request: int, candidates: frozenset[int] = frozenset()) -> None:
        """Cancel a request's `candidates`, all of them where none is named."""
        for sequence_id in list(gateway.sequences.get(request, [])):
            wanted = self._origins[sequence_id].candidates
            wanted -= candidates or set(wanted)
            if not wanted:
                self._end(gateway, request, sequence_id)
                self._engine.cancel(sequence_id)

    def _end(self, gateway: Gateway, request: int, sequence_id: SequenceId) -> None:
        """Forget one sequence, and with its last one the request."""
        live = gateway.sequences[request]
        live.remove(sequence_id)
        if not live:
            del gateway.sequences[request]
        del self._origins[sequence_id]
        if self._is_draining and not self._origins:
            self._on_drained()


def _draining() -> runner_pb2.ServeResponse:
    return runner_pb2.ServeResponse(draining=runner_pb2.Draining())


def _too_late() -> runner_pb2.Refusal:
    return runner_pb2.Refusal(code=runner_pb2.Refusal.CODE_DRAINING, detail="the runner is shutting down")
