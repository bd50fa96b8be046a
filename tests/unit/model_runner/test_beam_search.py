"""The rules of beam search, on numbers made up by the tests; tests/golden holds them against transformers."""

import math

import pytest

from model_runner.beam_search import BeamSearch, BeamSearchParams, Choice, EarlyStopping
from model_runner.sequence import FinishReason
from model_runner.step import Hypothesis

STOP = 0
LENGTH, STOPPED = FinishReason.LENGTH, FinishReason.STOP


def search(
    width: int = 2,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = EarlyStopping.FALSE,
    *,
    max_tokens: int = 10,
    stop: tuple[int, ...] = (STOP,),
    num_hypotheses: int = 2,
) -> BeamSearch:
    params = BeamSearchParams(width, length_penalty, early_stopping, num_hypotheses, intermediate=False)
    return BeamSearch(params, frozenset(stop), max_tokens)


def test_as_many_continuations_matter_as_could_end_and_leave_enough_to_run() -> None:
    assert [search(4, stop=tuple(range(count))).num_continuations for count in (0, 1, 2, 5)] == [8, 8, 12, 24]


def test_the_best_continuations_of_all_beams_run_on() -> None:
    beams = search()
    assert beams.advance([[(5, -1.0), (6, -2.0), (7, -3.0)]]) == [Choice(0, 5), Choice(0, 6)]
    assert beams.advance([[(5, -4.0), (6, -5.0)], [(7, -0.5), (8, -1.0)]]) == [Choice(1, 7), Choice(1, 8)]
    assert beams.running == [Hypothesis([6, 7], -1.25, None), Hypothesis([6, 8], -1.5, None)]


def test_of_equals_the_better_beam_comes_first_then_the_lower_token() -> None:
    beams = search()
    assert beams.advance([[(6, -1.0), (5, -1.0)]]) == [Choice(0, 5), Choice(0, 6)]
    assert beams.advance([[(9, -1.0)], [(8, -1.0)]]) == [Choice(0, 9), Choice(1, 8)]


def test_an_answer_ends_only_if_it_is_among_the_best() -> None:
    beams = search()
    beams.advance([[(5, -1.0), (6, -2.0), (STOP, -3.0)]])
    beams.advance([[(STOP, -1.0), (5, -2.0)], [(6, -3.0), (STOP, -4.0)]])
    assert beams.hypotheses[0] == Hypothesis([5], -1.0, STOPPED)
    assert beams.hypotheses[1].score == -math.inf


def test_the_limit_ends_the_best_continuations() -> None:
    beams = search(max_tokens=2)
    beams.advance([[(5, -1.0), (6, -2.0)]])
    assert beams.advance([[(7, -1.0), (8, -2.0)], [(STOP, -0.5), (9, -4.0)]]) == []
    assert beams.hypotheses == [Hypothesis([5, 7], -1.0, LENGTH), Hypothesis([6], -1.25, STOPPED)]


@pytest.mark.parametrize(("penalty", "best"), [(0.0, [STOP]), (2.0, [5, 5])])
def test_the_greater_the_length_penalty_the_longer_the_best_answer(penalty: float, best: list[int]) -> None:
    beams = search(1, penalty, max_tokens=2, num_hypotheses=1, early_stopping=EarlyStopping.NEVER)
    beams.advance([[(STOP, -1.0), (5, -1.5)]])
    beams.advance([[(5, -0.5), (6, -3.0)]])
    assert beams.hypotheses[0].token_ids == ([] if best == [STOP] else best)


@pytest.mark.parametrize(
    ("early_stopping", "steps"), [(EarlyStopping.TRUE, 2), (EarlyStopping.FALSE, 3), (EarlyStopping.NEVER, 7)]
)
def test_early_stopping_decides_when_a_search_with_enough_answers_ends(
    early_stopping: EarlyStopping, steps: int
) -> None:
    beams = search(early_stopping=early_stopping)
    beams.advance([[(STOP, -1.0), (5, -1.2), (6, -1.3)]])
    choices, taken = beams.advance([[(7, -0.2), (STOP, -0.3)], [(8, -1.0)]]), 2
    assert [hypothesis.score for hypothesis in beams.hypotheses] == [-0.75, -1.0]
    while choices:
        # The best beam has -1.4, and 2 less with every step: -3.4 / 3 is less than -1, -9.4 / 10 is more.
        choices, taken = beams.advance([[(7, -2.0)], [(7, -9.0)]]), taken + 1
    assert taken == steps


def test_what_is_banned_is_no_continuation() -> None:
    beams = search(stop=(), max_tokens=3)
    assert beams.advance([[(5, 0.0), (6, -math.inf)]]) == [Choice(0, 5)]
    assert beams.advance([[(5, -1.0), (6, -2.0)]]) == [Choice(0, 5), Choice(0, 6)]


def test_a_search_starts_again_with_nothing() -> None:
    beams = search()
    first = [[(5, -1.0), (6, -2.0), (STOP, -0.5)]]
    choices = beams.advance(first)
    beams.restart()
    assert beams.advance(first) == choices
    assert [h.token_ids for h in beams.running] == [[5], [6]]
