"""Beam search: which continuations of the running beams live on, and which answers are the best.

Policy only, by the rules of transformers' `generate` with `num_beams`: of every step's continuations the best
`max(2, 1 + stop tokens) * width` are looked at. Those that end are finished answers if they are among the best
`width`, and of the others the best `width` run on. The best `width` finished answers are kept.
"""

import enum
import math
from dataclasses import dataclass
from typing import NamedTuple

from model_runner.logprobs import TokenLogprobs
from model_runner.sequence import FinishReason
from model_runner.step import Continuations, Hypothesis


class EarlyStopping(enum.Enum):
    """When a search ends that has `width` finished answers; see EarlyStopping in types.proto."""

    FALSE = enum.auto()
    TRUE = enum.auto()
    NEVER = enum.auto()


@dataclass(frozen=True)
class BeamSearchParams:
    """What is searched for."""

    width: int
    length_penalty: float
    early_stopping: EarlyStopping
    num_hypotheses: int
    """Answers that are wanted, at most `width`."""
    intermediate: bool
    """The running beams are wanted as well, after every step."""


class Choice(NamedTuple):
    """A beam that runs on: the beam that it continues, by its rank, and with which token."""

    parent: int
    token_id: int


class _Beam(NamedTuple):
    token_ids: list[int]
    logprob: float
    logprobs: list[TokenLogprobs]


class BeamSearch:
    """One search, which starts with an empty answer.

    Args:
        params: what is searched for.
        stop_token_ids: end an answer.
        max_tokens: length at which an answer ends.
    """

    def __init__(self, params: BeamSearchParams, stop_token_ids: frozenset[int], max_tokens: int) -> None:
        self.params = params
        self._stop_token_ids = stop_token_ids
        self._max_tokens = max_tokens
        self.restart()

    def restart(self) -> None:
        """Begin again."""
        self._running = [_Beam([], 0.0, [])]
        self._finished: list[Hypothesis] = []

    @property
    def num_continuations(self) -> int:
        """How many continuations of each beam may matter."""
        return max(2, 1 + len(self._stop_token_ids)) * self.params.width

    @property
    def running(self) -> list[Hypothesis]:
        """The running beams, best first; after the first step."""
        return [
            Hypothesis(beam.token_ids, self._score(beam.logprob, len(beam.token_ids)), None, beam.logprobs)
            for beam in self._running
        ]

    @property
    def hypotheses(self) -> list[Hypothesis]:
        """The finished answers that are wanted, best first.

        Where bans leave fewer than that, empty ones with a score of minus infinity follow.
        """
        missing = self.params.num_hypotheses - len(self._finished)
        nothing = Hypothesis([], -math.inf, FinishReason.LENGTH)
        return self._finished[: self.params.num_hypotheses] + [nothing] * missing

    def advance(
        self, continuations: list[Continuations], logprobs: list[list[TokenLogprobs]] | None = None
    ) -> list[Choice]:
        """Go one token further.

        Args:
            continuations: of each running beam, in the order of their ranks: the likeliest `num_continuations` tokens.
            logprobs: of each of these tokens, what is to be known of it in the answers; empty lists or None: nothing.

        Returns:
            The beams that run now, best first; none when the search has ended.
        """
        considered = self._best(continuations)
        length = len(self._running[0].token_ids) + 1
        at_limit = length >= self._max_tokens
        choices, running, finished = list[Choice](), list[_Beam](), list[Hypothesis]()
        for rank, (logprob, choice) in enumerate(considered):
            (known, _, told), token_id = self._running[choice.parent], choice.token_id
            told_now = [news for news in logprobs[choice.parent] if news.token_id == token_id] if logprobs else []
            stops = token_id in self._stop_token_ids
            if not stops and not at_limit:
                if len(running) < self.params.width:
                    choices.append(choice)
                    running.append(_Beam([*known, token_id], logprob, told + told_now))
            elif rank < self.params.width:
                token_ids = known if stops else [*known, token_id]
                reason = FinishReason.STOP if stops else FinishReason.LENGTH
                told = told if stops else told + told_now
                finished.append(Hypothesis(token_ids, self._score(logprob, length), reason, told))
        self._finish(finished)
        self._running = running
        if not running or self._is_over(length):
            return []
        return choices

    def _best(self, continuations: list[Continuations]) -> list[tuple[float, Choice]]:
        """The best continuations of all beams; of equals that of the better beam, then the lower token id first.

        What is impossible is left out.
        """
        scored = [
            (self._running[parent].logprob + logprob, Choice(parent, token_id))
            for parent, tokens in enumerate(continuations)
            for token_id, logprob in tokens
            if logprob > -math.inf
        ]
        scored.sort(key=lambda entry: (-entry[0], entry[1]))
        return scored[: self.num_continuations]

    def _finish(self, hypotheses: list[Hypothesis]) -> None:
        """Keep the best finished answers; of equals the older one."""
        if self._is_full and self.params.early_stopping is EarlyStopping.TRUE:
            return
        merged = sorted(self._finished + hypotheses, key=lambda hypothesis: -hypothesis.score)
        self._finished = merged[: self.params.width]

    @property
    def _is_full(self) -> bool:
        return len(self._finished) == self.params.width

    def _is_over(self, length: int) -> bool:
        """Whether no running beam is expected to beat the worst finished answer, or none shall any more."""
        if not self._is_full:
            return False
        early, penalty = self.params.early_stopping, self.params.length_penalty
        if early is EarlyStopping.TRUE:
            return True
        best_length = self._max_tokens if early is EarlyStopping.NEVER and penalty > 0 else length
        return self._score(self._running[0].logprob, best_length) <= self._finished[-1].score

    def _score(self, logprob: float, length: int) -> float:
        return logprob / float(length**self.params.length_penalty)
