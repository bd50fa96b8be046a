"""A router with runners that are nothing but a memory of what they were sent, and a clock that the test turns."""

from collections.abc import Sequence
from typing import Any

from gateway.finish_reason import FinishReason
from gateway.fleet import Role, RunnerInfo
from gateway.generation import Generation, ResolvedRequest
from gateway.router import Router
from gateway.sampling import Sampling
from gateway.token_stream import Tokens
from gateway.validation import Limits

PROMPT = [5, 6, 7]
WAIT_S = 60.0


class FakeLink:
    """Remembers what it is to send.

    Attributes:
        attempts: the attempt number, the max_tokens and the known tokens of each open candidate, of every submission.
        cancels: number and candidates.
    """

    def __init__(self, role: Role = Role.BOTH, *, is_standby: bool = False, context: int = 512) -> None:
        self.info = RunnerInfo(Limits(384, context), role, is_standby)
        self.attempts: list[tuple[int, int, dict[int, list[int]]]] = []
        self.cancels: list[tuple[int, tuple[int, ...]]] = []
        self.error: Exception | None = None

    def submit(self, generation: Generation, max_tokens: int) -> None:
        if self.error:
            raise self.error
        known = {index: [*generation.token_ids[index]] for index in sorted(generation.stream.open)}
        self.attempts.append((generation.attempt, max_tokens, known))

    def cancel(self, number: int, candidates: Sequence[int] = ()) -> None:
        self.cancels.append((number, tuple(candidates)))


class Rig:
    """A router, its clock, and the runners that are ready."""

    def __init__(self, *links: FakeLink) -> None:
        self.now = 1000.0
        self.router = Router(WAIT_S, lambda: self.now)
        self.join(*links)

    def join(self, *links: FakeLink) -> None:
        for link in links:
            self.router.ready(link, link.info)

    def submit(self, max_tokens: int = 100, resumed: dict[int, list[int]] | None = None, **sampling: Any) -> Generation:
        request = ResolvedRequest("r", "default", PROMPT, Sampling(max_tokens, **sampling), 1, max_tokens)
        generation = Generation(request, resumed)
        self.router.submit(generation)
        return generation

    def make(self, link: FakeLink, generation: Generation, *token_ids: int, candidate: int = 0, **more: Any) -> None:
        """An attempt, the newest unless told otherwise, makes tokens behind those that are known."""
        attempt = more.pop("attempt", generation.attempt)
        position = more.pop("position", len(generation.token_ids[candidate]))
        tokens = Tokens(candidate, list(token_ids), **more)
        self.router.take_tokens(link, generation.number, attempt, position, tokens)

    def after(self, seconds: float) -> None:
        self.now += seconds
        self.router.tick()


def failure(generation: Generation) -> Exception | None:
    return generation.stream._error


def taken(generation: Generation) -> list[tuple[int, list[int], FinishReason | None]]:
    """What the reader gets now."""
    news = generation.stream.take()
    return [(tokens.candidate, tokens.token_ids, tokens.finish_reason) for tokens in news.tokens]
