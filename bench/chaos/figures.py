"""What the records of a run amount to: pauses, tokens computed again, and how soon health told."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.chaos.faults import Fault, Signal
from bench.chaos.streams import Stream

_ON_THEIR_WAY = 2
"""Deltas that may still come after a fault, of steps that had ended or did not need what was hit."""
HEALTH_LIMIT_S = 2.0


@dataclass(frozen=True)
class Opens:
    """Counters of the cache manager, or how much they have grown.

    Attributes:
        lookups: streams without a token, for the most part new ones.
        reopens: streams that go on.
        missed_tokens: queried and not found.
    """

    lookups: int
    reopens: int
    missed_tokens: int

    @classmethod
    def of(cls, prefix: Mapping[str, int]) -> "Opens":
        """From the statistics' section of that name."""
        return cls(prefix["lookups"], prefix["reopens"], prefix["queried_tokens"] - prefix["hit_tokens"])

    def __sub__(self, other: "Opens") -> "Opens":
        return Opens(
            self.lookups - other.lookups, self.reopens - other.reopens, self.missed_tokens - other.missed_tokens
        )


@dataclass(frozen=True)
class Strike:
    """A fault that was done.

    Attributes:
        at: when the signal was sent, by the monotonic clock.
        num_live: streams under way then.
        sure_before: streams that began before this moment were at the process that was hit; later ones may have been
            with another runner, that had become ready meanwhile.
        has_stand_in: another runner goes on, so that the gateway serves all the while; its health tells of the loss by
            the name of the runners' service.
        up_at: when every process was there and attached again.
        opens: from the fault until every stream had gone on; None: the manager itself was hit.
    """

    fault: Fault
    at: float
    num_live: int
    sure_before: float = math.inf
    has_stand_in: bool = False
    up_at: float = math.inf
    opens: Opens | None = None


def pauses(strikes: Sequence[Strike], streams: Sequence[Stream]) -> list[float]:
    """For each strike and each stream that it surely hit: seconds from the signal to the stream's next token."""
    ends = [*(strike.at for strike in strikes[1:]), math.inf]
    return [
        resumed - strike.at
        for strike, end in zip(strikes, ends, strict=True)
        for stream in streams
        if stream.lives_at(strike.at) and stream.began < strike.sure_before
        if (resumed := _resumed_at(stream, strike.at, end)) is not None
    ]


def _resumed_at(stream: Stream, since: float, end: float) -> float | None:
    """When the longest of the first silences after a fault ended; None: nothing came before `end`.

    Not simply when the next token came: that may have been on its way.
    """
    silences = []
    for arrival in stream.arrivals_after(since, _ON_THEIR_WAY + 1):
        if arrival < end:
            silences.append((arrival - since, arrival))
            since = arrival
    return max(silences)[1] if silences else None


@dataclass(frozen=True)
class Recomputed:
    """Tokens computed again by whole streams that were hit.

    Attributes:
        worst: most tokens for each hit, of streams that had a token at every one.
        num_beyond: streams with more than the bound.
    """

    worst: float
    num_beyond: int


def recomputed(
    strikes: Sequence[Strike], streams: Iterable[Stream], block_size: int, prompt_lengths: Sequence[int]
) -> Recomputed:
    """Held against the bound: `block_size` a hit once the first token is out, before that the prompt as well."""
    worst, num_beyond = 0.0, 0
    for stream in streams:
        hits = [strike for strike in strikes if stream.lives_at(strike.at)]
        if not hits or not stream.is_whole:
            continue
        early = [hit for hit in hits if not stream.arrivals or stream.arrivals[0] > hit.at]
        bound = block_size * len(hits) + prompt_lengths[stream.prompt] * len(early)
        num_beyond += stream.recomputed_tokens > bound
        if not early:
            worst = max(worst, stream.recomputed_tokens / len(hits))
    return Recomputed(worst, num_beyond)


def missed_tokens(strikes: Iterable[Strike]) -> float | None:
    """Tokens that a stream which went on did not find, on average; only of strikes with no other lookups meanwhile."""
    opens = [strike.opens for strike in strikes if strike.opens and strike.opens.reopens and not strike.opens.lookups]
    reopens = sum(counted.reopens for counted in opens)
    return sum(counted.missed_tokens for counted in opens) / reopens if reopens else None


@dataclass(frozen=True)
class HealthAnswer:
    """What the health service said, or that it said nothing.

    Attributes:
        at: when, by the monotonic clock.
        serving: whether the gateway was SERVING; None: it did not answer.
        complete: whether the runners' service was, so that none of them is missing; None: it did not answer.
    """

    at: float
    serving: bool | None
    complete: bool | None


@dataclass(frozen=True)
class HealthFigures:
    """How health followed.

    Attributes:
        num_told: strikes after which it was not SERVING while something was missing.
        slowest_s: longest time from one of these until it said so.
        back_s: longest time from one of these until it was SERVING again.
        num_late: strikes that health had not told within `HEALTH_LIMIT_S`: deaths and hangs, and of processes that went
            on by themselves those that were away for longer than that.
        num_needless: strikes with a stand-in after which the gateway was not SERVING for a while.
    """

    num_told: int
    slowest_s: float
    back_s: float
    num_late: int
    num_needless: int = 0


def health_figures(
    strikes: Sequence[Strike],
    answers: Sequence[HealthAnswer],
    until: float,
    tolerance_s: float,
) -> HealthFigures:
    """Hold the gateway's answers against the faults.

    Args:
        strikes: in order.
        answers: of the health service, in order.
        until: the end of the run.
        tolerance_s: how far apart its answers are.
    """
    ends = [strike.at for strike in strikes[1:]] + [until]
    waits = [_telling(strike, end, answers, tolerance_s) for strike, end in zip(strikes, ends, strict=True)]
    told = [wait for wait in waits if wait.down_s is not None]
    return HealthFigures(
        num_told=len(told),
        slowest_s=max((wait.down_s or 0.0 for wait in told), default=0.0),
        back_s=max((wait.back_s for wait in told), default=0.0),
        num_late=sum(wait.is_late for wait in waits),
        num_needless=sum(wait.is_needless for wait in waits),
    )


@dataclass(frozen=True)
class _Telling:
    """What health said of one fault: seconds from it until NOT_SERVING (None: never), and until SERVING again."""

    down_s: float | None
    back_s: float
    is_late: bool
    is_needless: bool


def _telling(strike: Strike, end: float, answers: Sequence[HealthAnswer], tolerance_s: float) -> _Telling:
    # A gateway that does not answer tells of its own end, and of nobody else's.
    heard = [answer for answer in answers if answer.serving is not None or strike.fault.process == "gateway"]
    told = [(answer.at, answer.complete if strike.has_stand_in else answer.serving) for answer in heard]
    was_well = next((well for at, well in reversed(told) if at <= strike.at), False)
    over = min(strike.up_at, end) + tolerance_s
    down = next((at for at, well in told if was_well and strike.at < at < over and not well), math.inf)
    back = next((at for at, well in told if at > down and well), end)
    away_s = strike.fault.hold_s if strike.fault.signal is Signal.STOP else math.inf
    return _Telling(
        down_s=down - strike.at if down < math.inf else None,
        back_s=back - strike.at,
        is_needless=strike.has_stand_in and any(a.serving is False for a in heard if strike.at < a.at < over),
        is_late=HEALTH_LIMIT_S + tolerance_s < min(away_s, down - strike.at),
    )
