"""One stream as its client sees it, and how it differs from the same request in a fault-free run."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Expected:
    """What a request is answered with when nothing happens."""

    token_ids: tuple[int, ...]
    text: str


@dataclass
class Stream:
    """Filled delta by delta; times are readings of the monotonic clock.

    Attributes:
        prompt: its number in the workload.
        began: when it was asked for.
        arrivals: when each delta with tokens came.
        lost_tokens: positions that no delta had, though later ones came.
        doubled_tokens: positions that came again.
        ended: when its answer was whole or failed; None while it runs.
        error: what its client was told instead of the rest.
        recomputed_tokens: of its usage.
    """

    prompt: int
    began: float
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    arrivals: list[float] = field(default_factory=list)
    lost_tokens: int = 0
    doubled_tokens: int = 0
    ended: float | None = None
    error: str = ""
    recomputed_tokens: int = 0
    _next_position: int = 0

    def take(self, now: float, position: int, token_ids: Sequence[int], text: str) -> None:
        """Take in one delta, whose first token stands at `position` of the answer."""
        if token_ids:
            self.arrivals.append(now)
        self.lost_tokens += max(0, position - self._next_position)
        end = position + len(token_ids)
        self.doubled_tokens += max(0, min(self._next_position, end) - position)
        self._next_position = max(self._next_position, end)
        self.token_ids += token_ids
        self.text += text

    def finish(self, now: float, expected: Expected, recomputed_tokens: int) -> None:
        """The answer is whole, says the server; tokens that are missing at its end are lost as well."""
        self.ended = now
        self.recomputed_tokens = recomputed_tokens
        self.lost_tokens += max(0, len(expected.token_ids) - self._next_position)
        self.doubled_tokens += max(0, self._next_position - len(expected.token_ids))

    def fail(self, now: float, error: str) -> None:
        """The client got an error."""
        self.ended = now
        self.error = error

    @property
    def is_whole(self) -> bool:
        """It has ended, and without an error."""
        return self.ended is not None and not self.error

    def lives_at(self, moment: float) -> bool:
        """Whether it was under way then."""
        return self.began <= moment and (self.ended is None or self.ended > moment)

    def arrivals_after(self, moment: float, count: int) -> list[float]:
        """When the first `count` deltas after that moment came."""
        first = bisect.bisect_right(self.arrivals, moment)
        return self.arrivals[first : first + count]


@dataclass(frozen=True)
class Difference:
    """A whole stream whose text is not the fault-free run's.

    Attributes:
        prompt: its number in the workload.
        position: of the first token that differs; that of the answer's end if only the text does.
        gap: between the two highest logits there, by the reference; None: not computed.
    """

    prompt: int
    position: int
    gap: float | None = None


def difference(stream: Stream, expected: Expected) -> Difference | None:
    """Where a whole stream leaves the fault-free run; None: nowhere."""
    if tuple(stream.token_ids) == expected.token_ids and stream.text == expected.text:
        return None
    pairs = enumerate(zip(stream.token_ids, expected.token_ids, strict=False))
    shorter = min(len(stream.token_ids), len(expected.token_ids))
    return Difference(stream.prompt, next((i for i, (ours, theirs) in pairs if ours != theirs), shorter))
