"""Beam search through the whole engine; tests/golden holds its answers against transformers'."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from model_runner.beam_search import BeamSearchParams, EarlyStopping
from model_runner.model.load import LoadedModel
from model_runner.step import Hypothesis
from tests.fakes.engine import EngineUnderTest, load_tiny, running_engine
from tests.models import write_tiny_model

STOP = frozenset(range(3, 384, 9))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path: Path = tmp_path_factory.mktemp("model")
    return load_tiny(write_tiny_model(path / "tiny"))


@pytest.fixture
def engine(model: LoadedModel) -> Iterator[EngineUnderTest]:
    with running_engine(model) as under_test:
        yield under_test
        under_test.settle()


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 384), k=length)


def of_width(width: int, *, intermediate: bool = False, num_hypotheses: int | None = None) -> BeamSearchParams:
    return BeamSearchParams(width, 1.0, EarlyStopping.FALSE, num_hypotheses or width, intermediate)


def alone(model: LoadedModel, prompt: list[int], width: int, max_tokens: int = 24) -> list[Hypothesis]:
    with running_engine(model) as under_test:
        answer = under_test.search(prompt, of_width(width), max_tokens, stop=STOP)
        under_test.wait(answer)
        return answer.hypotheses


def same(ones: list[Hypothesis], others: list[Hypothesis]) -> bool:
    """Scores apart by no more than the order of summation."""
    pairs = zip(ones, others, strict=True)
    return all(one[::2] == other[::2] and abs(one.score - other.score) < 1e-4 for one, other in pairs)


def test_one_beam_is_the_greedy_answer(engine: EngineUnderTest) -> None:
    prompt = prompt_of(21, seed=1)
    greedy = engine.wait(engine.submit(prompt))[0]
    answer = engine.search(prompt, of_width(1))
    engine.wait(answer)
    assert [hypothesis.token_ids for hypothesis in answer.hypotheses] == [greedy]


def test_searches_and_other_requests_change_nothing_of_each_other(engine: EngineUnderTest, model: LoadedModel) -> None:
    prompts = [prompt_of(10 + 7 * i, seed=i) for i in range(3)]
    answers = [engine.search(prompt, of_width(4), stop=STOP) for prompt in prompts]
    neighbours = [engine.submit(prompt_of(20, seed=50 + i), 40) for i in range(4)]
    candidates = engine.submit_candidates(prompts[0], 4, 40, seed=6)
    engine.wait(*answers, *neighbours, *candidates)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert same(answer.hypotheses, alone(model, prompt, 4))
    assert neighbours[0].token_ids == engine.wait(engine.submit(prompt_of(20, seed=50), 40))[0]


def test_only_the_answers_that_are_wanted_come(engine: EngineUnderTest, model: LoadedModel) -> None:
    prompt = prompt_of(21, seed=2)
    answer = engine.search(prompt, of_width(8, num_hypotheses=3), stop=STOP)
    engine.wait(answer)
    assert same(answer.hypotheses, alone(model, prompt, 8)[:3])


def test_intermediate_beams_grow_token_by_token(engine: EngineUnderTest) -> None:
    answer = engine.search(prompt_of(21, seed=3), of_width(4, intermediate=True), 12)
    engine.wait(answer)
    assert [len(beam.token_ids) for beams in answer.beams for beam in beams] == [
        n for n in range(1, 12) for _ in "four"
    ]
    for beams in answer.beams:
        assert [beam.score for beam in beams] == sorted((beam.score for beam in beams), reverse=True)


def test_beams_share_their_past(engine: EngineUnderTest) -> None:
    engine.wait(engine.search(prompt_of(100, seed=4), of_width(8), 40))
    counters = engine.cache.pool.policy.stats().counters
    assert (counters.lookups, counters.queried_tokens) == (1, 100)
    assert counters.forks > 20


def test_searches_that_give_way_in_a_tiny_pool_start_again_and_find_the_same(model: LoadedModel) -> None:
    prompts = [prompt_of(20, seed=i) for i in range(3)]
    with running_engine(model, num_blocks=30) as under_test:
        answers = [under_test.search(prompt, of_width(4), 30, stop=STOP) for prompt in prompts]
        greedy = [under_test.submit(prompt, 60) for prompt in prompts]
        under_test.wait(*answers, *greedy)
        assert under_test.scheduler.num_preemptions >= 4
        under_test.settle()
    for prompt, answer in zip(prompts, answers, strict=True):
        assert same(answer.hypotheses, alone(model, prompt, 4, 30))


def test_a_budget_smaller_than_the_search_is_wide_takes_it_in_parts(model: LoadedModel) -> None:
    prompt = prompt_of(20, seed=5)
    with running_engine(model, max_batch_tokens=3) as under_test:
        answer = under_test.search(prompt, of_width(8), stop=STOP)
        under_test.wait(answer)
        assert same(answer.hypotheses, alone(model, prompt, 8))
        under_test.settle()


@pytest.mark.parametrize("reason", ["the stream broke", "closed"])
def test_a_search_starts_again_when_the_cache_manager_is_lost(model: LoadedModel, reason: str) -> None:
    prompt = prompt_of(60, seed=6)
    with running_engine(model) as under_test:
        answer = under_test.search(prompt, of_width(4, intermediate=True), 40, stop=STOP)
        for _ in range(2):
            for _ in range(5):
                under_test.steps.get(timeout=30)
            under_test.cache.lose(reason)
        under_test.wait(answer)
        assert same(answer.hypotheses, alone(model, prompt, 4, 40))
        assert [len(beams[0].token_ids) for beams in answer.beams].count(1) >= 2
        under_test.settle()


def test_a_cancelled_search_leaves_nothing_behind(engine: EngineUnderTest, model: LoadedModel) -> None:
    neighbour = engine.submit(prompt_of(30, seed=8), 60)
    for i in range(4):
        answer = engine.search(prompt_of(40 + i, seed=i), of_width(4, intermediate=True), 400)
        while len(answer.beams) < 5 * i:
            engine.steps.get(timeout=30)
        engine.engine.cancel(answer.sequence.id)
    with running_engine(model) as under_test:
        assert engine.wait(neighbour) == under_test.wait(under_test.submit(prompt_of(30, seed=8), 60))
