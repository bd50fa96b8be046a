"""Which runner serves which generation, decided without a runner, a loop or a clock that runs."""

from collections.abc import Sequence
from typing import Any

from gateway.finish_reason import FinishReason
from gateway.fleet import RunnerInfo
from gateway.generation import Generation, ResolvedRequest
from gateway.router import Router
from gateway.sampling import Sampling
from gateway.token_stream import Tokens
from gateway.validation import Limits
from pagekeeper.common.errors import BugError

PROMPT = [5, 6, 7]
LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP
WAIT_S = 60.0


class FakeLink:
    """Remembers what it is to send.

    Attributes:
        submits: number, attempt, max_tokens and the known tokens of each open candidate.
        cancels: number and candidates.
    """

    def __init__(self, **info: Any) -> None:
        limits = Limits(384, info.pop("context", 512))
        self.info = RunnerInfo(limits, **info)
        self.submits: list[tuple[int, int, int, dict[int, list[int]]]] = []
        self.cancels: list[tuple[int, tuple[int, ...]]] = []
        self.error: Exception | None = None

    def submit(self, generation: Generation, max_tokens: int) -> None:
        if self.error:
            raise self.error
        known = {index: [*generation.token_ids[index]] for index in sorted(generation.stream.open)}
        self.submits.append((generation.number, generation.attempt, max_tokens, known))

    def cancel(self, number: int, candidates: Sequence[int] = ()) -> None:
        self.cancels.append((number, tuple(candidates)))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Rig:
    """A router, its clock, and the runners that are ready."""

    def __init__(self, *links: FakeLink) -> None:
        self.clock = Clock()
        self.router = Router(WAIT_S, self.clock)
        for link in links:
            self.join(link)

    def join(self, link: FakeLink) -> FakeLink:
        self.router.ready(link, link.info)
        return link

    def submit(self, max_tokens: int = 100, prompt: Sequence[int] = PROMPT, **sampling: Any) -> Generation:
        request = ResolvedRequest("r", "default", list(prompt), Sampling(max_tokens, **sampling), 1, max_tokens)
        generation = Generation(request)
        self.router.submit(generation)
        return generation

    def make(
        self, link: FakeLink, generation: Generation, token_ids: list[int], candidate: int = 0, **more: Any
    ) -> None:
        """The newest attempt makes tokens behind those that are known."""
        attempt = more.pop("attempt", generation.attempt)
        position = more.pop("position", len(generation.token_ids[candidate]))
        self.router.take_tokens(link, generation.number, attempt, position, Tokens(candidate, token_ids, **more))


def failure(generation: Generation) -> Exception | None:
    return generation.stream._error


def test_output_of_an_older_attempt_is_dropped_and_a_gap_ends_the_request() -> None:
    first, second = FakeLink(), FakeLink()
    rig = Rig(first)
    generation = rig.submit()
    rig.join(second)
    rig.router.lose(first)
    rig.make(second, generation, [8], attempt=1)
    rig.make(first, generation, [8], attempt=1)
    rig.make(first, generation, [8], attempt=2)
    assert generation.token_ids[0] == []
    rig.make(second, generation, [9, 10])
    rig.make(second, generation, [10, 11], position=1)
    assert generation.token_ids[0] == [9, 10, 11]
    rig.make(second, generation, [12], position=5)
    assert generation.token_ids[0] == [9, 10, 11]
    assert isinstance(failure(generation), BugError)
    assert second.cancels == [(generation.number, ())]
