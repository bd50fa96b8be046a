"""Candidates of one request: the prompt is computed and stored once, and each answer is what it would be alone."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache_manager.stats import CacheStats
from model_runner.model.load import LoadedModel
from pagekeeper.common.operations import Operation
from tests.fakes.engine import BLOCK_SIZE, Answer, EngineUnderTest, load_tiny, running_engine
from tests.fakes.local_cache import LocalCache, LocalPool
from tests.models import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path: Path = tmp_path_factory.mktemp("model")
    return load_tiny(write_tiny_model(path / "tiny", max_position_embeddings=1024))


@pytest.fixture
def engine(model: LoadedModel) -> Iterator[EngineUnderTest]:
    with running_engine(model) as under_test:
        yield under_test
        under_test.settle()


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 384), k=length)


def alone(model: LoadedModel, prompt: list[int], n: int, seed: int, **options: float) -> list[list[int]]:
    with running_engine(model) as under_test:
        return under_test.wait(*under_test.submit_candidates(prompt, n, seed=seed, **options))


def test_candidates_differ_and_are_those_of_every_run(model: LoadedModel) -> None:
    first, second = (alone(model, prompt_of(21, seed=1), 4, seed=42) for _ in range(2))
    assert first == second
    assert len(set(map(tuple, first))) == 4


def test_case_23_seeded_candidates_are_the_same_among_31_mixed_neighbours(
    engine: EngineUnderTest, model: LoadedModel
) -> None:
    """Case 23: seed 42 alone = seed 42 among mixed neighbours, with and without seeds, greedy and not."""
    rng = random.Random(23)
    neighbours = [
        engine.submit(prompt_of(rng.randrange(1, 60), seed=i), 30, temperature=rng.choice([0.0, 0.7, 1.5]), seed=i)
        for i in range(31)
    ]
    among = engine.submit_candidates(prompt_of(21, seed=1), 4, seed=42)
    assert engine.wait(*among) == alone(model, prompt_of(21, seed=1), 4, seed=42)
    engine.wait(*neighbours)


def test_each_candidate_is_what_it_is_when_asked_for_alone(engine: EngineUnderTest) -> None:
    prompt = prompt_of(21, seed=2)
    together = engine.wait(*engine.submit_candidates(prompt, 4, seed=7))
    for index in range(4):
        (single,) = engine.submit_candidates(prompt, 4, seed=7, generated={index: []})
        assert engine.wait(single) == [together[index]]


@pytest.mark.parametrize("received", [(0, 0, 0, 0), (1, 1, 1, 1), (0, 5, 9, 23), (3, 8, 16, 2)])
def test_resumed_candidates_go_on_where_they_were(model: LoadedModel, received: tuple[int, ...]) -> None:
    prompt = prompt_of(21, seed=3)
    whole = alone(model, prompt, 4, seed=9)
    with running_engine(model) as under_test:  # with nothing in the cache
        generated = {index: whole[index][:count] for index, count in enumerate(received)}
        answers = under_test.submit_candidates(prompt, 4, seed=9, generated=generated)
        assert under_test.wait(*answers) == whole
        computed = sum(max(0, count - 1) for count in received)
        counted = sum(answer.sequence.num_recomputed_tokens for answer in answers)
        # The prompt's whole blocks are computed again once for all, what follows them by each that has gone on.
        assert counted == 0 if not any(received) else 16 + computed < counted <= 16 + computed + 4 * BLOCK_SIZE
        under_test.settle()


def test_resumed_candidates_compute_less_than_a_block_each_of_what_is_cached(model: LoadedModel) -> None:
    prompt = prompt_of(21, seed=3)
    with running_engine(model) as under_test:
        whole = under_test.wait(*under_test.submit_candidates(prompt, 4, 60, seed=9))
        for received in ((0, 5, 9, 43), (30, 18, 36, 22), (12, 12, 12, 12)):
            generated = {index: whole[index][:count] for index, count in enumerate(received)}
            answers = under_test.submit_candidates(prompt, 4, 60, seed=9, generated=generated)
            assert under_test.wait(*answers) == whole
            assert max(answer.sequence.num_recomputed_tokens for answer in answers) < BLOCK_SIZE
        under_test.settle()


def test_greedy_candidates_are_the_single_answer(engine: EngineUnderTest) -> None:
    prompt = prompt_of(30, seed=4)
    single = engine.wait(engine.submit(prompt))[0]
    assert engine.wait(*engine.submit_candidates(prompt, 5, temperature=0.0)) == [single] * 5


class WatchedCache(LocalCache):
    """Keeps what the pool looked like after every message."""

    def __init__(self, pool: LocalPool, runner_id: str) -> None:
        super().__init__(pool, runner_id)
        self.history: list[CacheStats] = []

    def send(self, step: int, completed_step: int, operations: list[Operation]) -> None:
        super().send(step, completed_step, operations)
        self.history.append(self.pool.policy.stats())


@pytest.mark.parametrize(("num_prompt", "copies"), [(512, 0), (509, 7)])
def test_case_26_a_prompt_is_computed_and_stored_once_for_all_candidates(
    model: LoadedModel, num_prompt: int, copies: int
) -> None:
    """Case 26: n = 8 on a 512-token prompt: prompt computed once, prompt's full blocks stored once."""
    with running_engine(model, max_batch_tokens=128, cache_type=WatchedCache) as under_test:
        answers = under_test.submit_candidates(prompt_of(num_prompt, seed=5), 8, max_tokens=20, seed=1, max_context=600)
        under_test.wait(*answers)
        cache = under_test.cache
        assert isinstance(cache, WatchedCache)
        counters = cache.history[-1].counters
        assert (counters.forks, counters.copy_on_write) == (7, copies)
        assert (counters.lookups, counters.queried_tokens, counters.hit_tokens) == (1, num_prompt, 0)
        own = -(-(num_prompt + 20) // BLOCK_SIZE) - num_prompt // BLOCK_SIZE
        most = max(stats.usage.physical_blocks for stats in cache.history)
        assert most <= num_prompt // BLOCK_SIZE + 8 * own + 8
        assert max(stats.usage.sharing_saved for stats in cache.history) > 0.8
        assert sum(answer.sequence.num_recomputed_tokens for answer in answers) == 0
        under_test.settle()


def test_case_24_a_fork_inside_a_block_changes_nothing_of_its_parent(model: LoadedModel) -> None:
    """Case 24: fork mid-block, write the child: the parent's bytes hash the same."""
    prompt = prompt_of(21, seed=6)
    expected = alone(model, prompt, 4, seed=3, max_tokens=3)
    with running_engine(model) as under_test:
        answers = under_test.submit_candidates(prompt, 4, max_tokens=200, seed=3)
        first: Answer = answers[0]
        while min(len(answer.token_ids) for answer in answers) < 3:
            under_test.steps.get(timeout=30)
        assert [answer.token_ids[:3] for answer in answers] == expected
        for other in answers[1:]:
            under_test.engine.cancel(other.sequence.id)
        under_test.wait(first)
        assert [first.token_ids] == alone(model, prompt, 4, seed=3, max_tokens=200)[:1]
        under_test.settle()


def test_a_cancelled_candidate_leaves_the_others_alone(engine: EngineUnderTest, model: LoadedModel) -> None:
    prompt = prompt_of(100, seed=7)
    expected = alone(model, prompt, 4, seed=5, max_tokens=40)
    for cancelled_after in (0, 1, 10):
        answers = engine.submit_candidates(prompt, 4, max_tokens=40, seed=5)
        victim = answers[cancelled_after % 4]
        while len(victim.token_ids) < cancelled_after:
            engine.steps.get(timeout=30)
        engine.engine.cancel(victim.sequence.id)
        others = [answer for answer in answers if answer is not victim]
        assert engine.wait(*others) == [expected[answers.index(answer)] for answer in others]


def test_candidates_that_give_way_in_a_tiny_pool_lose_nothing(model: LoadedModel) -> None:
    prompts = [prompt_of(20, seed=i) for i in range(3)]
    expected = [alone(model, prompt, 4, seed=i, max_tokens=50) for i, prompt in enumerate(prompts)]
    with running_engine(model, num_blocks=24) as under_test:
        answers = [under_test.submit_candidates(prompt, 4, 50, seed=i) for i, prompt in enumerate(prompts)]
        assert [under_test.wait(*group) for group in answers] == expected
        assert under_test.scheduler.num_preemptions >= 3
        under_test.settle()


def test_more_candidates_than_may_run_at_once_are_all_answered(model: LoadedModel) -> None:
    prompt = prompt_of(20, seed=8)
    with running_engine(model, max_sequences=3) as under_test:
        assert under_test.wait(*under_test.submit_candidates(prompt, 8, seed=2)) == alone(model, prompt, 8, seed=2)
        under_test.settle()


@pytest.mark.parametrize("reason", ["the stream broke", "closed"])
def test_a_lost_cache_manager_makes_candidates_share_again(model: LoadedModel, reason: str) -> None:
    prompt = prompt_of(100, seed=9)
    expected = alone(model, prompt, 4, seed=8, max_tokens=60)
    with running_engine(model) as under_test:
        answers = under_test.submit_candidates(prompt, 4, max_tokens=60, seed=8)
        for _ in range(3):
            for _ in range(12):
                under_test.steps.get(timeout=30)
            under_test.cache.lose(reason)
        assert under_test.wait(*answers) == expected
        under_test.settle()
