"""A model runner's process: the service, the engine, and the device with which steps end in due time."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from model_runner.dispatch import RunnerInfo
from model_runner.scheduler import Scheduler, SchedulerLimits
from model_runner.sequence import Status
from model_runner.step import BeamsOutput, Output
from tests.simulation.device import Device, Flight
from tests.simulation.engine import Engine
from tests.simulation.network import End, Network
from tests.simulation.process import Process
from tests.simulation.recomputation import Recomputation
from tests.simulation.service import RunnerService
from tests.simulation.world import Violation


@dataclass(frozen=True)
class RunnerSettings:
    """What a runner is started with.

    Attributes:
        info: for the gateways.
        limits: what a step may hold.
        step_s: how long the usual step takes, in seconds.
        slow_step_s: how long a step may take at most that is held up.
        slow_step_share: how many are.
        step_limit_s: when a step counts as hung.
        rounds: what rounding decides is decided by chance.
        outlives_s: how long a step may go on after its process has died.
    """

    info: RunnerInfo
    limits: SchedulerLimits
    step_s: float
    slow_step_s: float
    slow_step_share: float
    step_limit_s: float
    rounds: bool
    outlives_s: float


class Runner(Process):
    """One life of a runner.

    Args:
        network: the network.
        name: its own.
        settings: its own.
        recomputation: counts what it computes.
        on_ready: is called when it could serve.
    """

    def __init__(
        self,
        network: Network,
        name: str,
        settings: RunnerSettings,
        recomputation: Recomputation,
        on_ready: Callable[["Runner"], None],
    ) -> None:
        super().__init__(network.world, name)
        self.engine = Engine(
            network,
            self,
            Scheduler(settings.limits),
            Device(name, network.world.random if settings.rounds else None),
            self._let_run,
            lambda: on_ready(self),
            self._hand_over,
            settings.step_limit_s,
        )
        self.service = RunnerService(settings.info, self, self.engine, recomputation)
        self._settings = settings
        self._recomputation = recomputation
        self._outbox: deque[tuple[int, list[Output | BeamsOutput]]] = deque()

    @property
    def holds(self) -> str:
        """What is left of requests, if anything."""
        parts = {
            "sequences": len(self.engine.scheduler._roster.by_id),
            "requests of gateways": self.service.num_requests,
        }
        return ", ".join(f"{count} {what}" for what, count in parts.items() if count)

    def start(self) -> None:
        """Attach, then serve."""
        self.run(self.engine.poke)

    def on_going_on(self) -> None:
        """The engine's thread goes on as well."""
        self.engine.poke()

    def accept(self, what: str, end: End) -> None:
        """A gateway connects."""
        self.service.accept(end)

    def died(self) -> None:
        """On a GPU a step may outlive its process."""
        flight, longest_s = self.engine.flight, self._settings.outlives_s
        if longest_s and flight is not None and not flight.ended:
            self.world.after(longest_s * self.world.random.random(), flight.write_late)

    def _hand_over(self, step: int, outputs: list[Output | BeamsOutput]) -> None:
        """From the engine's thread to the event loop."""
        self.world.note(self.name, "emits", step, *map(_words, outputs))
        for output in outputs:
            if isinstance(output, Output):
                self._check_sealed(output)
        self._outbox.append((step, outputs))
        self.after(self._settings.step_s * 0.05 * self.world.random.random(), self._deliver)

    def _deliver(self) -> None:
        self.service.deliver(*self._outbox.popleft())

    def _check_sealed(self, output: Output) -> None:
        """What a client sees is sealed up to its last block that is not full, unless some session lost its stream."""
        sequence, exchange = output.sequence, self.engine.session.current
        num_computed = sequence.num_prompt_tokens + output.position
        is_certain = sequence.status is Status.RUNNING and self._recomputation.is_bounded and not self.engine.stopping
        if exchange is None or not is_certain or num_computed % self._settings.limits.block_size:
            return
        manager = exchange.welcome.manager
        if manager.is_alive and not manager.is_sealed(sequence.tenant, sequence.token_ids[:num_computed]):
            raise Violation(f"{self.name} shows {_words(output)} before it has sealed what comes before")

    def _let_run(self, flight: Flight) -> None:
        settings, chance = self._settings, self.world.random.random()
        duration = settings.step_s * (0.5 + chance)
        if chance < settings.slow_step_share:
            duration += settings.slow_step_s * chance / settings.slow_step_share
        if settings.outlives_s:
            self.world.after(duration, self._ends_by_itself, flight)
        else:
            self.after(duration, self._ends_with_process, flight)

    def _ends_by_itself(self, flight: Flight) -> None:
        """On a GPU a step does not stop when its process does."""
        if self.is_alive:
            flight.end()
            self.run(self._flight_ended, flight)

    def _ends_with_process(self, flight: Flight) -> None:
        flight.end()
        self._flight_ended(flight)

    def _flight_ended(self, flight: Flight) -> None:
        self._recomputation.computed(flight)
        self.engine.poke()


def _words(output: Output | BeamsOutput) -> str:
    if isinstance(output, BeamsOutput):
        return f"beams of {output.leader.id}"
    end = f" {output.finish_reason.value}" if output.finish_reason else ""
    return f"{output.sequence.id}[{output.position}]={output.token_id}{end}"
