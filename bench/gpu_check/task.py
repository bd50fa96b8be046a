"""What a section is made of: tasks, which make checks."""

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

NEEDS_DEVICE = "needs a CUDA device"
"""Reason of whatever a dry run leaves out."""

Result = Literal["pass", "fail", "recorded", "not run"]


class NotRunError(Exception):
    """This machine cannot run the task; the text says why."""


@dataclass(frozen=True)
class Check:
    """One row of the report."""

    name: str
    result: Result
    figure: str = ""
    """What was measured, for a reader."""
    value: float | None = None
    """The same as a number in the unit that `figure` names."""
    bound: str = ""
    """What it is held against; empty for what is only recorded."""
    reason: str = ""
    """Why it failed or was not run."""


def recorded(name: str, figure: str, value: float | None = None) -> Check:
    """A figure without a bound."""
    return Check(name, "recorded", figure, value)


def compared(name: str, ratio: float) -> Check:
    """By how much something takes longer than something else, without a bound; `value` is 0 for no difference."""
    return recorded(name, f"{ratio - 1:+.1%} time", ratio - 1)


def verified(name: str, holds: bool, figure: str, bound: str, value: float | None = None) -> Check:
    """A figure with a bound."""
    return Check(name, "pass" if holds else "fail", figure, value, bound)


def at_most(name: str, value: float, bound: float, unit: str = "") -> Check:
    """A number that must not exceed `bound`; NaN does."""
    return verified(name, value <= bound, f"{value:.3g}{unit}", f"<= {bound:g}{unit}", _finite(value))


def at_least(name: str, value: float, bound: float, unit: str = "") -> Check:
    """A number that must reach `bound`; NaN does not."""
    return verified(name, value >= bound, f"{value:.3g}{unit}", f">= {bound:g}{unit}", _finite(value))


def _finite(value: float) -> float | None:
    """What JSON has a number for."""
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class Setting:
    """What a section's process is told."""

    dry_run: bool
    seed: int
    end: float
    """time.monotonic() at which the section is ended."""
    facts: dict[str, float] = field(default_factory=dict)
    """Values of the checks that the section `facts` made, by name; SI units."""

    @property
    def device(self) -> str:
        """Where tensors live, as torch names it."""
        return "cpu" if self.dry_run else "cuda"

    @property
    def remaining_s(self) -> float:
        """Seconds until the section is ended."""
        return self.end - time.monotonic()

    def rng(self, name: str) -> random.Random:
        """Randomness of a task: the same for the same seed and name."""
        return random.Random(f"{self.seed} {name}")


@dataclass(frozen=True)
class Task:
    """A part of a section that can fail, hang or crash without the others."""

    name: str
    run: Callable[[Setting], Iterator[Check]]
    limit_s: float = 30.0
    """It is ended after so many seconds."""
    needs_device: bool = False
    """A dry run leaves it out."""
