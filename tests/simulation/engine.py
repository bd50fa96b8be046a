"""`model_runner.engine` as a coroutine: the same loop, in the same order, which waits by yielding what it waits for.

`test_simulated_engine.py` compares its messages with those of the real one.
"""

from collections import deque
from collections.abc import Callable

from model_runner.report import EngineReport, EngineState
from model_runner.scheduler import Scheduler
from model_runner.step import BeamsOutput, Output, Step
from pagekeeper.common.operations import Operation
from tests.simulation.cache_session import CacheSession
from tests.simulation.device import Device, Flight, Inputs
from tests.simulation.exchange import ConnectionLost
from tests.simulation.network import Network
from tests.simulation.process import Process, Waiting
from tests.simulation.world import Violation

_MOST_GATHERED = 8
_LONG_STEP_S = 0.1
_RETRY_PAUSE_S = 0.005
_MOST_STEPS_AT_ONCE = 1000
"""An engine that steps so often without ever waiting spins."""


class Engine:
    """One runner's engine.

    Args:
        network: where the cache manager is.
        process: its runner.
        scheduler: the policy under test.
        device: where steps run.
        let_run: has a flight end in due time.
        on_attached: is called once, when steps can be launched.
        on_outputs: is called with each step's number and outputs.
        step_limit_s: when a step counts as hung.
    """

    def __init__(
        self,
        network: Network,
        process: Process,
        scheduler: Scheduler,
        device: Device,
        let_run: Callable[[Flight], None],
        on_attached: Callable[[], None],
        on_outputs: Callable[[int, list[Output | BeamsOutput]], None],
        step_limit_s: float,
    ) -> None:
        self.scheduler = scheduler
        self.commands: deque[Callable[[], None]] = deque()
        self.session = CacheSession(network, process, device, self.poke, lambda: self.stopping)
        self.flight: Flight | None = None
        self.stopping = False
        self._process = process
        self._device = device
        self._let_run = let_run
        self._on_attached = on_attached
        self._on_outputs = on_outputs
        self._step_limit_s = step_limit_s
        self._step_number = 0
        self._num_gathered = 0
        self._is_computing = False
        self._drafted: tuple[Step, Inputs] | None = None
        self._pending: tuple[int, list[Output | BeamsOutput]] = (0, [])
        self._state = EngineState(process.world.now)
        self._waits_for: Callable[[], object] = _at_once
        self._coroutine = self.run()

    def poke(self) -> None:
        """Something has happened: go on if that is what the engine waits for."""
        resumed = 0
        while self._process.is_alive and not self._process.is_stopped and self._waits_for():
            resumed += 1
            if resumed > _MOST_STEPS_AT_ONCE:
                raise Violation(f"{self._process.name}: the engine spins")
            self._waits_for = next(self._coroutine, _never)

    def report(self) -> EngineReport:
        """What the engine is doing now."""
        running, waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        return self._state.report(
            self._process.world.now,
            running,
            waiting,
            0.0,
            0.0,
            self.scheduler.num_preemptions,
            detached=not self.session.is_attached,
        )

    def run(self) -> Waiting[None]:
        """See `Engine.run`; the process ends with it."""
        try:
            yield from self._attach()
            self._on_attached()
            while not self.stopping:
                yield from self.step()
                if not self._is_unsettled and not self._pending[1]:
                    yield from self._take_commands(self.session.seconds_to_heartbeat())
                elif self.scheduler.stalled and not self.scheduler.running:
                    yield from self._take_commands(_RETRY_PAUSE_S)
                else:
                    yield _at_once
            self.scheduler.cancel_all()
            while self._is_unsettled:
                yield from self.step()
        except ConnectionLost:
            self._process.world.note(self._process.name, "has no cache manager")
        self.session.close()
        self._process.kill()

    @property
    def _is_unsettled(self) -> bool:
        return self.scheduler.has_work or self.session.holds_blocks

    def step(self) -> Waiting[None]:
        """See `Engine.step`."""
        has_news = yield from self._take_commands(wait_s=0)
        self._step_number += 1
        step = self._schedule(has_news=has_news)
        flight = self._launch(step)
        connected = yield from self._talk(self.scheduler.plan(), in_flight=flight is not None)
        self._emit()
        if flight is not None:
            self.scheduler.advance(step)
            if connected and self._is_computing and self.scheduler.can_draft:
                self._draft()
            connected = yield from self._watch(flight, connected=connected)
            sampled, _ = flight.result()
            self._pending = (self._step_number, self.scheduler.complete(sampled))
            if connected and (operations := self.scheduler.plan_beams()):
                connected = yield from self._talk(operations, in_flight=False)
        if connected:
            self._state = EngineState(self._process.world.now, self._step_number)
        else:
            self._emit()
            yield from self._attach()

    def _take_commands(self, wait_s: float) -> Waiting[bool]:
        if wait_s:
            yield from self.session.wait(lambda: self.commands, wait_s)
        came = bool(self.commands)
        while self.commands:
            self.commands.popleft()()
        return came

    def _schedule(self, *, has_news: bool) -> Step:
        if has_news and not self._is_computing and self._num_gathered < _MOST_GATHERED:
            self._num_gathered += 1
            return self.scheduler.hold_back()
        self._num_gathered = 0
        step = self.scheduler.schedule()
        self._is_computing = bool(step.entries)
        return step

    def _launch(self, step: Step) -> Flight | None:
        if not step.entries and not step.copies:
            return None
        self.flight = self._device.launch(self._inputs_of(step))
        self._state = EngineState(self._process.world.now, self._step_number, self._step_limit_s, self.flight)
        self._process.effect(self._let_run, self.flight)
        return self.flight

    def _watch(self, flight: Flight, *, connected: bool) -> Waiting[bool]:
        """Wait for the end of a step, with a word to the cache manager now and then; False if that is lost."""
        while connected:
            yield from self.session.wait(lambda: flight.ended, _LONG_STEP_S)
            if flight.ended:
                return True
            connected = yield from self._talk([], in_flight=True)
        if not flight.ended:
            yield lambda: flight.ended
        return False

    def _draft(self) -> None:
        step = self.scheduler.draft()
        self._drafted = (step, self._device.prepare(step)) if step.entries else None

    def _inputs_of(self, step: Step) -> Inputs:
        drafted, self._drafted = self._drafted, None
        return self._device.prepare(step) if drafted is None or drafted[0] is not step else drafted[1]

    def _talk(self, operations: list[Operation], *, in_flight: bool) -> Waiting[bool]:
        completed = self._step_number - in_flight
        if not operations and not self.session.must_talk(completed):
            return True
        self._state = self._state.waiting(self._process.world.now)
        try:
            results = yield from self.session.exchange(self._step_number, completed, operations)
        except ConnectionLost:
            return False
        self._state = self._state.answered()
        if self.scheduler.apply(results):
            self.session.hold(self._step_number)
        return True

    def _emit(self) -> None:
        step, outputs = self._pending
        if outputs:
            self._process.effect(self._on_outputs, step, outputs)
            self._pending = (step, [])

    def _attach(self) -> Waiting[None]:
        now, asked = self._process.world.now, self._state.asked
        self._state = EngineState(now, self._step_number).waiting(now if asked is None else asked)
        yield from self.session.attach()
        self.scheduler.restart()
        self._state = EngineState(self._process.world.now, self._step_number)


def _at_once() -> bool:
    return True


def _never() -> bool:
    return False
