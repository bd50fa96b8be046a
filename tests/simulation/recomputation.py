"""How much is computed twice, counted at the devices, and held against the bound of docs/architecture.md.

The bound holds where nothing but runners and gateways died: the manager lived, no session lost its stream, nothing was
evicted and nobody had to give way.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from model_runner.sequence import Sequence
from tests.simulation.device import Flight, Memory
from tests.simulation.world import Violation

if TYPE_CHECKING:
    from tests.simulation.engine import Engine


@dataclass
class _Attempt:
    """One sequence of one submission.

    Attributes:
        request: whose it is.
        most_computed: the most of its tokens that were ever computed, by earlier attempts too.
        bound: how many of them may be computed again.
        has_begun: some of its tokens had been computed before.
        reports: whether the runner must report just as many; of what several candidates share, it counts more.
        recomputed: how many were.
    """

    request: str
    most_computed: int
    bound: int
    has_begun: bool
    reports: bool
    recomputed: int = 0


class Recomputation:
    """Keeps count over all runners' lives.

    Args:
        block_size: tokens of a block.
        max_batch_tokens: the longest chunk of a prompt.

    Attributes:
        is_bounded: no session has lost its stream while its manager lived.
        num_checked: sequences that had begun elsewhere and were held against the bound.
    """

    def __init__(self, block_size: int, max_batch_tokens: int) -> None:
        self.is_bounded = True
        self.num_checked = 0
        # Whole blocks are sealed before the client sees the token after them.
        self._after_first_token = block_size - 1
        self._before_first_token = block_size + 2 * max_batch_tokens
        self._attempts: dict[Sequence, _Attempt] = {}
        self._prompts: dict[str, int] = {}
        """Tokens of each request's prompt that some step has computed."""
        self._memories: dict[str, Memory | None] = {}
        """Where all of a request's tokens were computed; None: in several pools."""

    def submitted(self, request: str, sequences: list[Sequence]) -> None:
        """A request comes to a runner, with the tokens that it has."""
        for sequence in sequences:
            if sequence.num_resumed_tokens:
                known, bound = sequence.was_computed, self._after_first_token
            else:
                known, bound = self._prompts.get(request, 0), self._before_first_token
            reports = len(sequences) == 1 and sequence.num_resumed_tokens > 0
            self._attempts[sequence] = _Attempt(request, known, bound, known > 0, reports)

    def computed(self, flight: Flight) -> None:
        """A step has ended."""
        for sequence, _, first, last in flight.rows:
            attempt = self._attempts[sequence]
            attempt.recomputed += max(0, min(attempt.most_computed, last) - first)
            attempt.most_computed = max(attempt.most_computed, last)
            request, prompt = attempt.request, min(last, sequence.num_prompt_tokens)
            self._prompts[request] = max(self._prompts.get(request, 0), prompt)
            if self._memories.setdefault(request, flight.memory) is not flight.memory:
                self._memories[request] = None

    def check(self, sequence: Sequence, engine: "Engine") -> None:
        """A sequence has ended: was it within the bound?"""
        attempt, exchange = self._attempts[sequence], engine.session.current
        if exchange is None or self._memories[attempt.request] is not exchange.memory:
            return
        evictions = exchange.welcome.manager.policy.stats().counters.evictions
        if not self.is_bounded or sequence.num_preemptions or evictions:
            return
        self.num_checked += attempt.has_begun
        what = f"sequence {sequence.id} of {attempt.request} computed {attempt.recomputed} tokens again"
        if attempt.recomputed > attempt.bound:
            raise Violation(f"{what}, more than {attempt.bound}")
        if attempt.reports and sequence.num_recomputed_tokens != attempt.recomputed:
            raise Violation(f"{what} and reports {sequence.num_recomputed_tokens}")
