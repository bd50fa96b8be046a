"""What the engine's thread is doing, in a form that other threads can read at any time."""

import enum
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from model_runner.device import Flight

_SLOW_ANSWER_S = 0.5
"""An answer takes milliseconds; one that takes longer is the cache manager's fault, whatever the step does."""


class Activity(enum.Enum):
    """What the engine is busy with."""

    IDLE = enum.auto()
    IN_STEP = enum.auto()
    WAITING_FOR_MANAGER = enum.auto()


@dataclass(frozen=True)
class EngineReport:
    """A snapshot for the gateway and for the watchdog."""

    activity: Activity
    step: int
    seconds: float
    """How long the activity has lasted."""
    limit_seconds: float
    """How long this step may last; 0 when not in a step."""
    hung: bool
    """The step takes longer than it may."""
    running: int
    waiting: int
    step_seconds: float
    """Total time of steps since the start."""
    manager_wait_seconds: float
    """Of it and beside it: total time in which the device had nothing to do because an answer was missing."""
    preemptions: int
    detached: bool
    """There is no session with a cache manager: it is lost, or its first message is not answered yet."""


@dataclass(frozen=True)
class EngineState:
    """Replaced whole by the engine's thread at each change, so that a reader never sees half of one."""

    since: float
    """time.monotonic() of the change."""
    step: int = 0
    limit_seconds: float = 0.0
    flight: "Flight | None" = None
    asked: float | None = None
    """When the open question to the cache manager was sent."""

    def waiting(self, now: float) -> "EngineState":
        """An answer of the cache manager is awaited from now on."""
        return replace(self, asked=now)

    def answered(self) -> "EngineState":
        """The answer is there."""
        return replace(self, asked=None)

    def report(
        self,
        now: float,
        running: int,
        waiting: int,
        step_seconds: float,
        manager_wait_seconds: float,
        preemptions: int,
        *,
        detached: bool,
    ) -> EngineReport:
        """Name the activity: while a step still runs, it takes a slow answer for the cache manager to be named."""
        in_step = self.flight is not None and not self.flight.ended
        activity, seconds = Activity.IDLE, now - self.since
        if self.asked is not None and not (in_step and now - self.asked < _SLOW_ANSWER_S):
            activity, seconds = Activity.WAITING_FOR_MANAGER, now - self.asked
        elif in_step:
            activity = Activity.IN_STEP
        return EngineReport(
            activity=activity,
            step=self.step,
            seconds=seconds,
            limit_seconds=self.limit_seconds if activity is Activity.IN_STEP else 0.0,
            hung=in_step and now - self.since > self.limit_seconds,
            running=running,
            waiting=waiting,
            step_seconds=step_seconds,
            manager_wait_seconds=manager_wait_seconds,
            preemptions=preemptions,
            detached=detached,
        )
