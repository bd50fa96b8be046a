"""Which process is hit, how and when: drawn from a seed, without a look at any process."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Signal(StrEnum):
    """What is done to a process."""

    KILL = "kill"
    """SIGKILL; the supervisor starts it again."""
    STOP = "stop"
    """SIGSTOP, and SIGCONT after a while."""
    HANG = "hang"
    """SIGSTOP for good: it is the supervisor who has to end it."""


PROCESSES = ("runner", "standby", "gateway", "manager")
"""With a standby, "runner" is whichever of the two has the streams at that moment, and "standby" is the other one."""


@dataclass(frozen=True)
class Fault:
    """One blow. `wait_s` counts from when everything is up and every stream runs; `hold_s` is how long a stop lasts."""

    process: str
    signal: Signal
    wait_s: float
    hold_s: float


@dataclass(frozen=True)
class Plan:
    """What is drawn from.

    Attributes:
        targets: processes and what is done to them.
        count: of faults that hit live streams.
        wait_s: least and most of `Fault.wait_s`.
        hold_s: least and most of `Fault.hold_s`.
    """

    targets: tuple[tuple[str, Signal], ...]
    count: int
    wait_s: tuple[float, float] = (0.3, 1.0)
    hold_s: tuple[float, float] = (0.2, 3.0)


def draw(plan: Plan, seed: str) -> Iterator[Fault]:
    """Faults without end: round after round, each has every target once, in random order."""
    rng = random.Random(seed)
    while True:
        for process, signal in rng.sample(plan.targets, len(plan.targets)):
            yield Fault(process, signal, rng.uniform(*plan.wait_s), rng.uniform(*plan.hold_s))
