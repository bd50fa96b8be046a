"""The engine: one thread that turns granted sequences into tokens, step by step.

A step k, as `Engine.step` reads:

    schedule   choose work from what message k-1 was granted
    launch     the device starts; from here on everything overlaps it
    exchange   message k: seals and releases of what steps before k computed, slots for step k+1
    emit       the tokens of step k-1; their predecessors are sealed now
    draft      step k+1 as it will be unless a sequence ends, laid out but for the tokens of step k
    complete   wait for the device, with a word to the cache manager now and then; take in the tokens of step k
    beams      only if a beam search runs: a message of its own, since how beams fork depends on these tokens

The device never waits for the cache manager: what an answer grants is used by the next step. A token is shown to a
client only after the message that seals what was computed before it, so whoever resumes the stream finds it cached.
"""

import contextlib
import queue
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from cache_manager.client import CacheConnectionLost, Exchange
from model_runner.batch import write_sampled_tokens
from model_runner.cache_session import CacheSession
from model_runner.device import Device, Flight
from model_runner.inputs import StepInputs
from model_runner.report import EngineReport, EngineState
from model_runner.scheduler import Scheduler
from model_runner.sequence import Sequence
from model_runner.step import BeamsOutput, Output, Step
from pagekeeper.common.failpoints import failpoint
from pagekeeper.common.ids import SequenceId
from pagekeeper.common.operations import Operation, Seal

_MOST_GATHERED = 8
"""Messages that may pass before a first step, as long as further requests come: a runner that takes over streams gets
them one by one, and computes them together."""
_LONG_STEP_S = 0.1
"""A step that takes longer is interrupted for what must be said to the cache manager meanwhile."""
_RETRY_PAUSE_S = 0.005
"""How long an engine with nothing to run waits before it asks again for blocks that another runner holds."""


@dataclass(frozen=True)
class StepCost:
    """How long a step may take before the runner counts as hung; grows with the step's tokens."""

    base_s: float
    per_token_s: float

    def limit_s(self, num_tokens: int) -> float:
        """Seconds for a step of so many tokens."""
        return self.base_s + num_tokens * self.per_token_s


class Engine:
    """Runs the scheduler's steps on the device. `run` is the body of its thread; the other methods are for others.

    Args:
        scheduler: used by the engine's thread alone.
        device: where steps run.
        connect: waits for a cache manager and begins a session with it; what it raises ends `run`.
        on_outputs: called on the engine's thread with a step's number and outputs; must not block.
        cost: when a step counts as hung.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        device: Device,
        connect: Callable[[], Exchange],
        on_outputs: Callable[[int, list[Output | BeamsOutput]], None],
        cost: StepCost,
    ) -> None:
        self._scheduler = scheduler
        self._device = device
        self._session = CacheSession(connect, device, lambda: self._stopping)
        self._on_outputs = on_outputs
        self._cost = cost
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = False
        self._started = threading.Event()
        self._attached = False
        self._step_number = 0
        self._num_gathered = 0
        self._is_computing = False
        self._drafted: tuple[Step, StepInputs] | None = None
        self._pending: tuple[int, list[Output | BeamsOutput]] = (0, [])
        # Written by the engine's thread, read by the event loop; each is replaced whole.
        self._state = EngineState(since=time.monotonic())
        self._step_seconds = 0.0
        self._manager_wait_seconds = 0.0
        self._last_talk = (0.0, 0.0)

    # -- for other threads

    def submit(self, *candidates: Sequence) -> None:
        """Hand over the candidates of a new request, or the sequences of a new beam search."""
        self._commands.put(lambda: self._scheduler.add(*candidates))

    def cancel(self, sequence_id: SequenceId) -> None:
        """Drop a sequence, or the search it is a beam of, at the next step boundary; no output of a later step."""
        self._commands.put(lambda: self._scheduler.cancel(sequence_id))

    def stop(self) -> None:
        """End `run` at the next step boundary, once everything that lives is released, if the manager answers."""
        self._stopping = True
        self._commands.put(lambda: None)

    def wait_until_attached(self) -> bool:
        """Wait until steps can be launched; False if `run` ended before."""
        self._started.wait()
        return self._attached

    def report(self) -> EngineReport:
        """What the engine is doing now."""
        return self._state.report(
            now=time.monotonic(),
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            step_seconds=self._step_seconds,
            manager_wait_seconds=self._manager_wait_seconds,
            preemptions=self._scheduler.num_preemptions,
            detached=not self._session.is_attached,
        )

    # -- the engine's thread

    def run(self) -> None:
        """Step until `stop`; a lost cache manager is attached to again, anything else that goes wrong is raised."""
        try:
            self._attach()
            self._attached = True
            self._started.set()
            while not self._stopping:
                self.step()
                if not self._is_unsettled and not self._pending[1]:
                    self._take_commands(self._session.seconds_to_heartbeat())
                elif self._scheduler.stalled and not self._scheduler.running:
                    self._take_commands(_RETRY_PAUSE_S)
            self._scheduler.cancel_all()
            while self._is_unsettled:
                self.step()
        except CacheConnectionLost:
            if not self._stopping:
                raise
        except BaseException as error:
            # An error keeps the frames that it passed alive, and these hold views of the pool, which is unmapped next.
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            self._started.set()
            # A device that has failed may fail again here: each is tried, whatever became of the one before.
            with contextlib.ExitStack() as stack:
                stack.callback(self._session.close)
                stack.callback(self._device.unbind)
                stack.callback(self._device.close)

    @property
    def _is_unsettled(self) -> bool:
        """The cache manager must be told something yet."""
        return self._scheduler.has_work or self._session.holds_blocks

    def step(self) -> None:
        """One step, as the module's docstring says."""
        started = time.monotonic()
        has_news = self._take_commands(wait_s=0)
        self._step_number += 1
        step = self._schedule(has_news=has_news)
        flight = self._launch(step)
        connected = self._talk(self._scheduler.plan(), in_flight=flight is not None)
        self._emit()
        if flight is not None:
            self._scheduler.advance(step)
            if connected and self._is_computing and self._scheduler.can_draft:
                self._draft()
            while connected and not flight.wait(_LONG_STEP_S):
                connected = self._talk([], in_flight=True)
            sampled, ended_at = flight.result()
            self._pending = (self._step_number, self._scheduler.complete(sampled))
            self._step_seconds += time.monotonic() - started
            self._count_wait(ended_at)
            if connected and (operations := self._scheduler.plan_beams()):
                connected = self._talk(operations, in_flight=False)
        if connected:
            self._state = EngineState(since=time.monotonic(), step=self._step_number)
        else:
            self._emit()
            self._attach()

    def _take_commands(self, wait_s: float) -> bool:
        """Carry out what other threads asked for, waiting up to `wait_s` for the first command; False if none came."""
        try:
            self._commands.get(block=wait_s > 0, timeout=wait_s)()
        except queue.Empty:
            return False
        with contextlib.suppress(queue.Empty):
            while True:
                self._commands.get(block=False)()
        return True

    def _schedule(self, *, has_news: bool) -> Step:
        """This step's work; no token if none is being computed and who has just come may be part of what is."""
        if has_news and not self._is_computing and self._num_gathered < _MOST_GATHERED:
            self._num_gathered += 1
            return self._scheduler.hold_back()
        self._num_gathered = 0
        step = self._scheduler.schedule()
        self._is_computing = bool(step.entries)
        return step

    def _launch(self, step: Step) -> Flight | None:
        if not step.entries and not step.copies:
            return None
        flight = self._device.launch(self._inputs_of(step))
        limit_s = self._cost.limit_s(step.num_tokens)
        self._state = EngineState(time.monotonic(), self._step_number, limit_s, flight)
        if step.copies:
            failpoint("runner.mid_copy")
        return flight

    def _draft(self) -> None:
        """While the device runs, lay out what it will most likely run next."""
        step = self._scheduler.draft()
        self._drafted = (step, self._device.prepare(step)) if step.entries else None

    def _inputs_of(self, step: Step) -> StepInputs:
        drafted, self._drafted = self._drafted, None
        if drafted is None or drafted[0] is not step:
            return self._device.prepare(step)
        inputs = drafted[1]
        write_sampled_tokens(inputs, step)
        return inputs

    def _talk(self, operations: list[Operation], *, in_flight: bool) -> bool:
        """Exchange a message if there is anything to say. False if the cache manager is lost.

        Args:
            operations: what the scheduler has planned.
            in_flight: this step is running.
        """
        completed = self._step_number - in_flight
        if not operations and not self._session.must_talk(completed):
            return True
        sent = time.monotonic()
        self._state = self._state.waiting(sent)
        try:
            results = self._session.exchange(self._step_number, completed, operations)
        except CacheConnectionLost:
            return False
        self._state = self._state.answered()
        self._last_talk = (sent, time.monotonic())
        if not in_flight:
            self._count_wait(sent)
        if self._scheduler.apply(results):
            self._session.hold(self._step_number)
        if any(isinstance(operation, Seal) for operation in operations):
            failpoint("runner.after_seal")
        return True

    def _count_wait(self, idle_since: float) -> None:
        """The device had nothing to do from `idle_since` to the answer, if that came later."""
        sent, answered = self._last_talk
        self._manager_wait_seconds += max(0.0, answered - max(sent, idle_since))

    def _emit(self) -> None:
        step, outputs = self._pending
        if outputs:
            self._on_outputs(step, outputs)
            self._pending = (step, [])
            failpoint("runner.after_emit")

    def _attach(self) -> None:
        """Begin a session and let every live sequence be opened anew."""
        now, asked = time.monotonic(), self._state.asked
        self._state = EngineState(now, self._step_number).waiting(now if asked is None else asked)
        self._session.attach()
        self._scheduler.restart()
        self._state = EngineState(time.monotonic(), self._step_number)
