"""`model_runner.service`: gateways' streams, who gets which output, drain and retirement.

A mirror of `RunnerService`. What it takes and sends are the very messages.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from model_runner.sequence import Sequence
from model_runner.step import BeamsOutput, Output
from model_runner.submission import RequestLimits, Submissions
from model_runner.wire import wire_hypotheses, wire_output, wire_report
from pagekeeper.common.ids import SequenceId
from pagekeeper.v1 import runner_pb2
from tests.simulation.engine import Engine
from tests.simulation.network import End
from tests.simulation.process import Process
from tests.simulation.recomputation import Recomputation


@dataclass(frozen=True)
class ServiceSettings:
    """What a runner says of itself.

    Attributes:
        requests: what they must keep to.
        role: a name without its prefix.
    """

    requests: RequestLimits
    role: str = "BOTH"
    is_standby: bool = False

    def hello(self, runner_id: str) -> runner_pb2.RunnerHello:
        """How it introduces itself."""
        return runner_pb2.RunnerHello(
            runner_id=runner_id,
            vocab_size=self.requests.vocab_size,
            max_context_length=self.requests.max_context_length,
            block_size=self.requests.block_size,
            role=runner_pb2.Role.Value(f"ROLE_{self.role}"),
            standby=self.is_standby,
        )


@dataclass(eq=False)
class _Gateway:
    end: End
    name: str
    sequences: dict[int, list[SequenceId]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Origin:
    gateway: _Gateway
    request: int
    attempt: int
    candidates: set[int]


class RunnerService:
    """See there.

    Args:
        process: its runner.
        engine: does the work.
        settings: for the gateways.
        recomputation: counts what is computed.
    """

    def __init__(
        self, process: Process, engine: Engine, settings: ServiceSettings, recomputation: Recomputation
    ) -> None:
        self.is_draining = False
        self._process = process
        self._engine = engine
        self._settings = settings
        self._recomputation = recomputation
        self._has_ended = False
        self._submissions = Submissions(settings.requests)
        self._gateways: list[_Gateway] = []
        self._origins: dict[SequenceId, _Origin] = {}

    @property
    def num_requests(self) -> int:
        """Those that gateways have here."""
        return max(len(self._origins), sum(len(gateway.sequences) for gateway in self._gateways))

    def accept(self, end: End) -> None:
        """A gateway connects."""
        gateway = _Gateway(end, end.peer.process.name)
        end.on_message = lambda message: self._take(message, gateway)
        end.on_end = lambda: self._gateway_gone(gateway)
        end.send(self._settings.hello(self._process.name))
        if self.is_draining:
            end.send(runner_pb2.Draining())
        if self._has_ended:
            end.close()
        else:
            self._gateways.append(gateway)

    def drain(self, grace_s: float) -> None:
        """Refuse new requests, let gateways move the live ones or see them end here, then end every stream and exit."""
        if not self.is_draining:
            self._note("drains")
            self.is_draining = True
            for gateway in self._gateways:
                gateway.end.send(runner_pb2.Draining())
        if self._origins and grace_s:
            self._process.after(grace_s, self._leave)
        else:
            self._leave()

    def _leave(self) -> None:
        self._has_ended = True
        for gateway in self._gateways.copy():
            gateway.end.close()
            self._gateway_gone(gateway)
        self._engine.stopping = True
        self._engine.poke()

    def _gateway_gone(self, gateway: _Gateway) -> None:
        if gateway in self._gateways:
            self._gateways.remove(gateway)
            for request in list(gateway.sequences):
                self._cancel(gateway, request)

    def _take(self, message: object, gateway: _Gateway) -> None:
        match message:
            case runner_pb2.Submit():
                self._submit(message, gateway)
            case runner_pb2.Cancel():
                self._cancel(gateway, message.request, frozenset(message.candidates))
            case runner_pb2.Ping():
                gateway.end.send(runner_pb2.Pong(nonce=message.nonce, engine=wire_report(self._engine.report())))

    def _submit(self, submit: runner_pb2.Submit, gateway: _Gateway) -> None:
        self._cancel(gateway, submit.request)
        refusal = self._submissions.refusal(submit)
        if self.is_draining:
            refusal = runner_pb2.Refusal(code=runner_pb2.Refusal.CODE_DRAINING)
        if refusal is not None:
            output = runner_pb2.SequenceOutput(request=submit.request, attempt=submit.attempt, refusal=refusal)
            gateway.end.send(runner_pb2.StepOutput(outputs=[output]))
            return
        if submit.sampling.HasField("beam_search"):
            sequences = self._submissions.beams(submit)
            self._expect(sequences[0], submit, gateway, {candidate.index for candidate in submit.candidates})
        else:
            sequences = self._submissions.candidates(submit)
            for sequence in sequences:
                self._expect(sequence, submit, gateway, {sequence.candidate})
        self._recomputation.submitted(submit.request_id, sequences)
        lengths = ", ".join(f"{sequence.id}: {sequence.num_resumed_tokens} tokens" for sequence in sequences)
        self._note("takes", submit.request_id, f"attempt {submit.attempt} of", gateway.name, lengths)
        self._command(lambda: self._engine.scheduler.add(*sequences))

    def _expect(self, sequence: Sequence, submit: runner_pb2.Submit, gateway: _Gateway, candidates: set[int]) -> None:
        self._origins[sequence.id] = _Origin(gateway, submit.request, submit.attempt, candidates)
        gateway.sequences.setdefault(submit.request, []).append(sequence.id)

    def _cancel(self, gateway: _Gateway, request: int, candidates: frozenset[int] = frozenset()) -> None:
        for sequence_id in list(gateway.sequences.get(request, [])):
            wanted = self._origins[sequence_id].candidates
            wanted -= candidates or set(wanted)
            if not wanted:
                self._note("cancels sequence", sequence_id)
                self._end(gateway, request, sequence_id)
                self._command(lambda ended=sequence_id: self._engine.scheduler.cancel(ended))

    def deliver(self, outputs: list[Output | BeamsOutput]) -> None:
        """What a step has made goes to the gateways."""
        messages: dict[_Gateway, runner_pb2.StepOutput] = {}
        for output in outputs:
            sequence = output.leader if isinstance(output, BeamsOutput) else output.sequence
            origin = self._origins.get(sequence.id)
            if origin is None:
                continue
            message = messages.setdefault(origin.gateway, runner_pb2.StepOutput())
            if isinstance(output, Output):
                message.outputs.append(wire_output(output, origin.request, origin.attempt))
                ended = output.finish_reason is not None
                if ended:
                    self._recomputation.check(sequence, self._engine)
            else:
                ended = output.ended
                message.outputs.extend(wire_hypotheses(output, origin.request, origin.attempt, origin.candidates))
            if ended:
                self._end(origin.gateway, origin.request, sequence.id)
        for gateway, message in messages.items():
            gateway.end.send(message)

    def _end(self, gateway: _Gateway, request: int, sequence_id: SequenceId) -> None:
        live = gateway.sequences[request]
        live.remove(sequence_id)
        if not live:
            del gateway.sequences[request]
        del self._origins[sequence_id]
        if self.is_draining and not self._has_ended and not self._origins:
            self._process.after(0.0, self._leave)

    def _command(self, command: Callable[[], None]) -> None:
        self._engine.commands.append(command)
        self._engine.poke()

    def _note(self, *what: object) -> None:
        self._process.world.note(self._process.name, *what)
