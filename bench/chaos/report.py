"""What a campaign has shown, and what is wrong with it."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.chaos.figures import HEALTH_LIMIT_S, HealthFigures, Recomputed
from bench.chaos.processes import Footprint
from bench.chaos.streams import Difference
from bench.reference import NEAR_TIE

EQUAL_SHARE = 0.99
MOST_GROWTH = Footprint(descriptors=4, threads=4, memory=16 << 20)
"""Of a process that lives through the campaign, from its 20th fault to its end."""


@dataclass(frozen=True)
class Pause:
    """Seconds from a fault to the next token, over all streams that were hit."""

    count: int
    median: float
    most: float


def pause_of(samples: Sequence[float]) -> Pause | None:
    """None: no stream was surely hit."""
    return Pause(len(samples), statistics.median(samples), max(samples)) if samples else None


@dataclass
class Report:
    """The outcome of one campaign.

    Attributes:
        faults: what was done, such as "kill runner", and how often it hit live streams.
        num_whole: streams that ended without an error.
        errors: of streams that were lost.
        differences: between whole streams and the fault-free run.
        pause_bound_s: what the median pause must stay below; None: it is only reported.
        recomputed: None where a lost pool has to be computed again, and where gateways die: the request that a client
            makes then has a usage of its own.
        missed_tokens: that the Open of a stream with tokens did not find in the cache, on average, by the manager's
            statistics; None where these begin anew with each manager.
        num_bystanders: processes that were restarted though nothing had been done to them.
        left: what should have been given back, and broken invariants.
        growth: of the processes that lived through all of it.
        broken: why the campaign was given up; empty if it was not.
    """

    name: str
    seed: str
    num_slots: int
    standby: bool
    faults: dict[str, int] = field(default_factory=dict)
    num_whole: int = 0
    errors: list[str] = field(default_factory=list)
    lost_tokens: int = 0
    doubled_tokens: int = 0
    differences: list[Difference] = field(default_factory=list)
    pause: Pause | None = None
    pause_bound_s: float | None = None
    recomputed: Recomputed | None = None
    missed_tokens: float | None = None
    block_size: int = 0
    health: HealthFigures | None = None
    num_bystanders: int = 0
    left: list[str] = field(default_factory=list)
    growth: dict[str, Footprint] = field(default_factory=dict)
    seconds: float = 0.0
    broken: str = ""

    @property
    def equal_share(self) -> float:
        """Of the whole streams, those whose text is the fault-free run's."""
        return 1 - len(self.differences) / self.num_whole if self.num_whole else 0.0

    def complaints(self) -> list[str]:
        """What is not as promised; empty: everything is."""
        wrong = []
        if self.broken:
            wrong.append(self.broken)
        if not self.num_whole:
            wrong.append("no stream was whole")
        if self.errors:
            wrong.append(f"{len(self.errors)} streams lost, such as: {self.errors[0]}")
        if self.lost_tokens or self.doubled_tokens:
            wrong.append(f"{self.lost_tokens} tokens lost, {self.doubled_tokens} doubled")
        if self.num_whole and self.equal_share < EQUAL_SHARE:
            wrong.append(f"only {self.equal_share:.1%} of the streams are equal")
        clear = [d for d in self.differences if d.gap is None or d.gap >= NEAR_TIE]
        if clear:
            wrong.append(f"{len(clear)} streams differ where the choice was clear, such as {clear[0]}")
        if self.pause_bound_s is not None and (self.pause is None or self.pause.median >= self.pause_bound_s):
            wrong.append(f"median pause not below {self.pause_bound_s:g} s")
        if self.recomputed is not None and self.recomputed.num_beyond:
            wrong.append(f"{self.recomputed.num_beyond} streams computed more again than a block for each fault")
        if self.missed_tokens is not None and self.missed_tokens > self.block_size:
            wrong.append(f"streams that went on missed {self.missed_tokens:.1f} tokens on average, more than a block")
        if self.health is not None and self.health.num_late:
            wrong.append(f"health told too late (> {HEALTH_LIMIT_S:g} s) after {self.health.num_late} faults")
        if self.health is not None and self.health.num_needless:
            wrong.append(f"the gateway stopped serving after {self.health.num_needless} faults, beside another runner")
        if self.num_bystanders:
            wrong.append(f"{self.num_bystanders} other processes restarted")
        wrong += self.left
        wrong += [f"{name} grew: {grown}" for name, grown in self.growth.items() if exceeds(grown, MOST_GROWTH)]
        return wrong


def exceeds(grown: Footprint, most: Footprint) -> bool:
    """Whether anything grew by more than it may."""
    return grown.descriptors > most.descriptors or grown.threads > most.threads or grown.memory > most.memory
