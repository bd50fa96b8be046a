"""The runners that are there, and which of them fits a generation best."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gateway.generation import Generation
from gateway.validation import Limits


class Role(enum.Enum):
    """Which part of an answer a runner is meant for; see runner.proto."""

    BOTH = enum.auto()
    PREFILL = enum.auto()
    DECODE = enum.auto()


@dataclass(frozen=True)
class RunnerInfo:
    """What a runner says of itself.

    Attributes:
        is_standby: it is for when no other runner fits.
    """

    limits: Limits
    role: Role = Role.BOTH
    is_standby: bool = False


class Link(Protocol):
    """The way to one runner. What is sent arrives in this order, or the link is lost."""

    def submit(self, generation: Generation, max_tokens: int) -> None:
        """Send the current attempt of a generation; each candidate's whole answer is to end at `max_tokens`.

        Raises:
            Exception: no message can hold it; nothing was sent.
        """

    def cancel(self, number: int, candidates: Sequence[int] = ()) -> None:
        """Tell the runner to stop a request, or only these candidates of it."""


@dataclass(eq=False)
class Runner:
    """A runner that has been ready and is not lost.

    Attributes:
        has_manager: whether its cache manager answers it. Without it, it takes requests and serves them later.
        is_draining: it takes no more requests.
        generations: those that are with it, by number.
    """

    link: Link
    info: RunnerInfo
    has_manager: bool = True
    is_draining: bool = False
    generations: dict[int, Generation] = field(default_factory=dict)

    def load(self) -> int:
        """How many sequences it works at for us."""
        return sum(generation.request.num_sequences for generation in self.generations.values())

    def takes(self, generation: Generation) -> bool:
        """Whether the generation could go on there."""
        length = len(generation.request.prompt_token_ids) + generation.shortest_attempt
        return not self.is_draining and length <= self.info.limits.max_context_length


class Fleet:
    """Every runner, by the link to it."""

    def __init__(self) -> None:
        self._runners: dict[Link, Runner] = {}
        self._limits: Limits | None = None

    @property
    def limits(self) -> Limits | None:
        """What each of them can take, or could when there last was one; None before the first."""
        return self._limits

    @property
    def is_serving(self) -> bool:
        """Whether some runner would answer a request now."""
        return any(runner.has_manager and not runner.is_draining for runner in self._runners.values())

    @property
    def is_well(self) -> bool:
        """Whether no runner lacks its cache manager; one that drains ends on purpose, whatever it lacks."""
        return all(runner.has_manager or runner.is_draining for runner in self._runners.values())

    def find(self, link: Link) -> Runner | None:
        """The runner behind a link; None: it has not been ready, or is lost."""
        return self._runners.get(link)

    def add(self, runner: Runner) -> None:
        """Take in a runner that is ready."""
        self._runners[runner.link] = runner
        self._update_limits()

    def remove(self, link: Link) -> Runner | None:
        """Let the runner behind a link go."""
        runner = self._runners.pop(link, None)
        self._update_limits()
        return runner

    def best(self, generation: Generation) -> Runner | None:
        """The runner for a generation's next attempt.

        One that has its cache manager goes first; then one that is meant for what is to be done next, is no standby, is
        meant for nothing else, has the least to do. Whatever it lacks of these bars no runner.
        """
        wanted = Role.PREFILL if generation.is_at_start else Role.DECODE

        def rank(runner: Runner) -> tuple[bool, bool, bool, bool, int]:
            role, fits = runner.info.role, runner.info.role in (wanted, Role.BOTH)
            return not runner.has_manager, not fits, runner.info.is_standby, role is not wanted, runner.load()

        takers = (runner for runner in self._runners.values() if runner.takes(generation))
        return min(takers, key=rank, default=None)

    def is_split(self, generation: Generation, runner: Runner) -> bool:
        """Whether the generation's next attempt, at `runner`, is for the first tokens alone, and another goes on."""
        if runner.info.role is not Role.PREFILL or not generation.is_at_start:
            return False
        return any(other.info.role is not Role.PREFILL and other.takes(generation) for other in self._runners.values())

    def _update_limits(self) -> None:
        """The least of all, so that none refuses what was let in."""
        every = [runner.info.limits for runner in self._runners.values()]
        if every:
            self._limits = Limits(
                vocab_size=min(limits.vocab_size for limits in every),
                max_context_length=min(limits.max_context_length for limits in every),
            )
