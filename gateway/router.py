"""Which runner serves which generation: at first, and when a runner is lost, drains, refuses or hands over.

A first submission and one after a loss are the same thing: prompt and tokens so far go to the runner that fits best,
under the next attempt number, or wait for one. There is nothing else to recover.

How to drive it, from one thread and without an event loop: tell it what clients want (`submit`, `cancel`,
`cancel_candidate`), what runners do (`ready`, `report`, `drain`, `lose`) and what comes of their attempts (`take_…`,
`refuse`), and call `tick` several times a second. It answers by calls of the `Link` that it got with `ready`, and in
each generation's stream. A link that was lost is never used again; the same runner comes back with a new one.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from gateway.finish_reason import FinishReason
from gateway.fleet import Fleet, Link, Runner, RunnerInfo
from gateway.generation import CacheUse, Generation
from gateway.token_stream import Beam, Tokens
from gateway.validation import Limits
from pagekeeper.common.errors import BugError, PagekeeperError, UnavailableError
from pagekeeper.v1.types_pb2 import TokenLogprobs

# A request that takes every runner down with it must not go round for ever.
_MAX_LOSSES_IN_A_ROW = 5


@dataclass(eq=False)
class _Place:
    """Where a generation is.

    Attributes:
        runner: None: it waits for one.
        max_tokens: where this attempt ends each candidate; not above the request's own.
        paused: the candidates that have come so far, while their answer has not ended.
        stuck_since: when it was first seen without a runner, or with one that has no cache manager.
    """

    generation: Generation
    runner: Runner | None = None
    max_tokens: int = 0
    paused: set[int] = field(default_factory=set)
    stuck_since: float | None = None


class Router:
    """Spreads generations over the runners that are ready.

    Args:
        wait_s: longest time that a generation is without a runner, or its runner without the cache manager, in seconds.
        clock: seconds, monotonic.
    """

    def __init__(self, wait_s: float, clock: Callable[[], float]) -> None:
        self._wait_s = wait_s
        self._clock = clock
        self._numbers = itertools.count(1)
        self._fleet = Fleet()
        self._places: dict[int, _Place] = {}

    @property
    def limits(self) -> Limits | None:
        """What every runner can take, or could when there last was one; None before the first."""
        return self._fleet.limits

    @property
    def is_serving(self) -> bool:
        """Whether some runner takes requests and has its cache manager."""
        return self._fleet.is_serving

    @property
    def is_well(self) -> bool:
        """Whether no runner lacks its cache manager."""
        return self._fleet.is_well

    @property
    def num_waiting(self) -> int:
        """Generations without a runner."""
        return sum(place.runner is None for place in self._places.values())

    def submit(self, generation: Generation) -> None:
        """Have the generation's stream filled until its last token, `cancel`, or failure. Raises nothing itself."""
        generation.number = next(self._numbers)
        place = self._places[generation.number] = _Place(generation)
        self._put(place)

    def cancel(self, generation: Generation) -> None:
        """Stop a generation, wherever it is; nothing happens if it has ended."""
        place = self._places.get(generation.number)
        if place is not None:
            if place.runner is not None:
                place.runner.link.cancel(generation.number)
            self._forget(place)

    def cancel_candidate(self, generation: Generation, candidate: int) -> None:
        """Stop one candidate, wherever its generation is; the others go on."""
        generation.stream.close(candidate)
        place = self._places.get(generation.number)
        if place is not None and place.runner is not None:
            place.runner.link.cancel(generation.number, [candidate])
            self._go_on(place)

    def ready(self, link: Link, info: RunnerInfo) -> None:
        """A runner has introduced itself and its engine is alive: what waits goes there, and what others drain of."""
        self._fleet.add(Runner(link, info))
        for place in self._each(self._places):
            if place.runner is None:
                self._put(place)
            elif place.runner.is_draining:
                self._move(place)

    def report(self, link: Link, *, has_manager: bool) -> None:
        """Whether a runner's cache manager answers it. One without keeps what it has, and takes more."""
        runner = self._fleet.find(link)
        if runner is not None:
            runner.has_manager = has_manager

    def drain(self, link: Link) -> None:
        """A runner takes no more: what it has moves on if another can take it, and otherwise ends there."""
        runner = self._fleet.find(link)
        if runner is not None:
            runner.is_draining = True
            for place in self._each(runner.generations):
                self._move(place)

    def lose(self, link: Link) -> int:
        """A runner is dead, hangs, or has ended its stream; returns how many generations had to leave it."""
        runner = self._fleet.remove(link)
        if runner is None:
            return 0
        numbers = list(runner.generations)
        for place in self._each(numbers):
            self._leave_runner(place)
            if not runner.is_draining:
                place.generation.losses_in_a_row += 1
        for place in self._each(numbers):
            self._put(place)
        return len(numbers)

    def refuse(self, link: Link, number: int, attempt: int, error: PagekeeperError | None) -> None:
        """A runner does not take an attempt, or gives it up: for `error`, or, if that is None, since it drains."""
        place = self._current(link, number, attempt)
        if place is None:
            return
        if error is not None:
            self._forget(place)
            place.generation.stream.fail(error)
        else:
            self._leave_runner(place)
            self.drain(link)
            self._put(place)

    def take_tokens(
        self, link: Link, number: int, attempt: int, position: int, tokens: Tokens, use: CacheUse | None = None
    ) -> None:
        """An attempt has made tokens, the first at `position` of a candidate's answer, and so far made this `use`."""
        place = self._current(link, number, attempt)
        if place is None:
            return
        generation, length = place.generation, position + len(tokens.token_ids)
        is_cut_short = place.max_tokens <= length < generation.request.max_tokens
        if tokens.finish_reason is FinishReason.LENGTH and is_cut_short:
            tokens.finish_reason = None
            place.paused.add(tokens.candidate)
        if use is not None:
            generation.count(tokens.candidate, use)
        self._add(place, lambda: generation.accept(position, tokens))
        self._go_on(place)

    def take_prompt_logprobs(self, link: Link, number: int, attempt: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """An attempt has made the prompt's log-probabilities."""
        place = self._current(link, number, attempt)
        if place is not None:
            self._add(place, lambda: place.generation.accept_prompt_logprobs(logprobs))

    def take_beams(self, link: Link, number: int, attempt: int, beams: Sequence[Beam]) -> None:
        """An attempt has new running beams."""
        place = self._current(link, number, attempt)
        if place is not None:
            self._add(place, lambda: place.generation.accept_beams(beams))

    def tick(self) -> None:
        """Give up what has been stuck for too long."""
        now = self._clock()
        for place in self._each(self._places):
            if place.runner is not None and place.runner.has_manager:
                place.stuck_since = None
            elif place.stuck_since is None:
                place.stuck_since = now
            elif now - place.stuck_since > self._wait_s:
                what = "no runner was ready for it" if place.runner is None else "its runner had no cache manager"
                self._fail(place, UnavailableError(f"{what} for {self._wait_s:g} s"))

    def _each(self, numbers: Iterable[int]) -> Iterator[_Place]:
        """Those that are still there at their turn: the end of one lets others in, and they may end some of these."""
        for number in list(numbers):
            if number in self._places:
                yield self._places[number]

    def _put(self, place: _Place) -> None:
        """Begin a new attempt at the runner that fits best, or wait for one."""
        self._leave_runner(place)
        generation = place.generation
        if generation.stream.has_ended:
            self._forget(place)
        elif generation.losses_in_a_row >= _MAX_LOSSES_IN_A_ROW:
            # Not UNAVAILABLE: a client that tries again would take the runners down again.
            text = f"{generation.losses_in_a_row} runners were lost in a row before they made a token"
            self._fail(place, BugError(f"request {generation.request.request_id}: {text}"))
        elif (runner := self._fleet.best(generation)) is not None:
            self._begin(place, runner)
        elif place.stuck_since is None:
            place.stuck_since = self._clock()

    def _begin(self, place: _Place, runner: Runner) -> None:
        generation = place.generation
        room = runner.info.limits.max_context_length - len(generation.request.prompt_token_ids)
        most = 1 if self._fleet.is_split(generation, runner) else room
        place.runner, place.max_tokens = runner, min(most, generation.request.max_tokens)
        runner.generations[generation.number] = generation
        generation.attempt += 1
        try:
            runner.link.submit(generation, place.max_tokens)
        except Exception as error:  # noqa: BLE001 - it is this request's fault, and others are being placed as well
            self._forget(place)
            generation.stream.fail(error)

    def _move(self, place: _Place) -> None:
        """Away from a runner that drains, if another takes it; that is no loss."""
        if place.runner is not None and self._fleet.best(place.generation) is not None:
            place.runner.link.cancel(place.generation.number)
            self._put(place)

    def _go_on(self, place: _Place) -> None:
        """Elsewhere, when the attempt has nothing more to give."""
        if place.paused and place.paused >= place.generation.stream.open:
            self._put(place)

    def _current(self, link: Link, number: int, attempt: int) -> _Place | None:
        """The generation to which this attempt may add; None: what it still says is void."""
        place = self._places.get(number)
        if place is None or place.runner is None or place.runner.link is not link:
            return None
        return place if place.generation.attempt == attempt else None

    def _add(self, place: _Place, change: Callable[[], None]) -> None:
        try:
            change()
        except BugError as error:
            self._fail(place, error)
        if place.generation.stream.has_ended:
            self._forget(place)

    def _fail(self, place: _Place, error: PagekeeperError) -> None:
        self.cancel(place.generation)
        place.generation.stream.fail(error)

    def _forget(self, place: _Place) -> None:
        """It has ended; once more does nothing."""
        self._leave_runner(place)
        self._places.pop(place.generation.number, None)

    @staticmethod
    def _leave_runner(place: _Place) -> None:
        if place.runner is not None:
            place.runner.generations.pop(place.generation.number, None)
        place.runner = None
        place.paused.clear()
