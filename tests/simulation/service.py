"""`model_runner.service`: gateways' streams around the real `Dispatch`, drain and retirement.

`test_simulated_service.py` compares its messages with those of the real one.
"""

from collections.abc import Callable

from model_runner.dispatch import Dispatch, Gateway, RunnerInfo
from model_runner.report import EngineReport
from model_runner.sequence import Sequence
from model_runner.step import BeamsOutput, Output
from pagekeeper.common.ids import SequenceId
from pagekeeper.v1 import runner_pb2
from tests.simulation.engine import Engine
from tests.simulation.network import End
from tests.simulation.process import Process
from tests.simulation.recomputation import Recomputation


class RunnerService:
    """See there.

    Args:
        info: for the gateways.
        process: its runner.
        engine: does the work.
        recomputation: counts what is computed.
    """

    def __init__(self, info: RunnerInfo, process: Process, engine: Engine, recomputation: Recomputation) -> None:
        self._process = process
        self._engine = engine
        self._recomputation = recomputation
        self._is_draining = False
        self._has_ended = False
        self._commands = _Commands(process, engine, recomputation)
        self._dispatch = Dispatch(info, self._commands, self._drained)

    @property
    def num_requests(self) -> int:
        """Those that gateways have here."""
        by_gateway = sum(len(gateway.sequences) for gateway in self._dispatch._gateways)
        return max(len(self._dispatch._origins), by_gateway)

    def accept(self, end: End) -> None:
        """A gateway connects."""
        gateway = Gateway(end.send, lambda: self._close(gateway, end))
        end.on_message = lambda message: self._take(gateway, end.peer.process.name, message)
        end.on_end = lambda: self._dispatch.leave(gateway)
        self._dispatch.join(gateway)

    def drain(self, grace_s: float) -> None:
        """Refuse new requests, let gateways move the live ones or see them end here, then end every stream and exit."""
        if not self._is_draining:
            self._process.world.note(self._process.name, "drains")
            self._is_draining = True
            self._dispatch.drain()
        if grace_s and not self._dispatch.is_idle:
            self._process.after(grace_s, self._leave)
        else:
            self._leave()

    def deliver(self, step: int, outputs: list[Output | BeamsOutput]) -> None:
        """What a step has made goes to the gateways."""
        for output in outputs:
            if isinstance(output, Output) and output.finish_reason and output.sequence.id in self._dispatch._origins:
                self._recomputation.check(output.sequence, self._engine)
        self._dispatch.deliver(step, outputs)

    def _take(self, gateway: Gateway, name: str, message: runner_pb2.ServeRequest) -> None:
        self._commands.came = (name, message.submit)
        self._dispatch.take(gateway, message)

    def _close(self, gateway: Gateway, end: End) -> None:
        end.close()
        self._dispatch.leave(gateway)

    def _drained(self) -> None:
        if not self._has_ended:
            self._process.after(0.0, self._leave)

    def _leave(self) -> None:
        self._has_ended = True
        self._dispatch.end()
        self._engine.stopping = True
        self._engine.poke()


class _Commands:
    """The engine as `Dispatch` knows it: on another thread.

    Attributes:
        came: the message that is being taken, if it is a submission, and which gateway has sent it.
    """

    def __init__(self, process: Process, engine: Engine, recomputation: Recomputation) -> None:
        self.came = ("", runner_pb2.Submit())
        self._process = process
        self._engine = engine
        self._recomputation = recomputation

    def submit(self, *sequences: Sequence) -> None:
        """See `Engine.submit`."""
        gateway, submit = self.came
        self._recomputation.submitted(submit.request_id, list(sequences))
        lengths = ", ".join(f"{sequence.id}: {sequence.num_resumed_tokens} tokens" for sequence in sequences)
        self._note("takes", submit.request_id, f"attempt {submit.attempt} of", gateway, lengths)
        self._command(lambda: self._engine.scheduler.add(*sequences))

    def cancel(self, sequence_id: SequenceId) -> None:
        """See `Engine.cancel`."""
        self._note("cancels sequence", sequence_id)
        self._command(lambda: self._engine.scheduler.cancel(sequence_id))

    def report(self) -> EngineReport:
        """See `Engine.report`."""
        return self._engine.report()

    def _command(self, command: Callable[[], None]) -> None:
        self._engine.commands.append(command)
        self._engine.poke()

    def _note(self, *what: object) -> None:
        self._process.world.note(self._process.name, *what)
