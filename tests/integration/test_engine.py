"""What an answer must not depend on: batching, chunking, caching, preemption, a restart of the cache manager."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from kernels.kv_layout import KvLayout
from model_runner.model.load import LoadedModel
from model_runner.report import Activity
from model_runner.sequence import FinishReason
from pagekeeper.common.ids import SequenceId
from pagekeeper.common.operations import Extend, Open, Opened, Operation, Result, Shortage
from tests.fakes.engine import Answer, EngineUnderTest, load_tiny, running_engine
from tests.fakes.local_cache import LocalCache, LocalPool
from tests.fakes.slow_device import SlowDevice
from tests.models import write_tiny_model


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


def alone(model: LoadedModel, prompt: list[int], max_tokens: int = 24, **options: float) -> list[int]:
    with running_engine(model) as under_test:
        return under_test.wait(under_test.submit(prompt, max_tokens, **options))[0]


def test_a_batch_changes_no_answer(engine: EngineUnderTest, model: LoadedModel) -> None:
    prompts = [prompt_of(3 + 5 * i % 41, seed=i) for i in range(32)]
    together = engine.wait(*[engine.submit(prompt) for prompt in prompts])
    for i in (0, 7, 31):
        assert together[i] == alone(model, prompts[i])


@pytest.mark.parametrize("max_batch_tokens", [16, 17, 2048])
def test_the_chunk_size_changes_no_answer(model: LoadedModel, max_batch_tokens: int) -> None:
    prompt = prompt_of(150, seed=1)
    with running_engine(model, max_batch_tokens=max_batch_tokens) as under_test:
        assert under_test.wait(under_test.submit(prompt)) == [alone(model, prompt)]


def test_case_04_a_warm_prefix_changes_no_answer(engine: EngineUnderTest) -> None:
    """Case 4: the same prompt cold, then warm: same tokens."""
    prompt = prompt_of(64, seed=2)
    cold = engine.submit(prompt)
    engine.wait(cold)
    warm = engine.submit(prompt)
    engine.wait(warm)
    assert warm.token_ids == cold.token_ids
    assert cold.sequence.num_cached_tokens == 0
    assert warm.sequence.num_cached_tokens == 63  # the last token is computed in any case
    assert warm.sequence.num_recomputed_tokens == 0


def test_case_07_concurrency_changes_no_output(model: LoadedModel) -> None:
    """Case 7: a 40-request mixed trace, ten times concurrently, equals the sequential run."""
    rng = random.Random(7)
    shared = prompt_of(40, seed=99)
    trace = [
        (
            shared[: rng.randrange(41)] + prompt_of(rng.randrange(1, 30), seed=i),
            {"max_tokens": rng.randrange(1, 20), "temperature": rng.choice([0.0, 0.9]), "seed": i},
        )
        for i in range(40)
    ]
    with running_engine(model) as under_test:
        sequential = [under_test.wait(under_test.submit(prompt, **options))[0] for prompt, options in trace]
    with running_engine(model) as under_test:
        for _ in range(10):
            order = rng.sample(range(40), k=40)
            answers = {i: under_test.submit(trace[i][0], **trace[i][1]) for i in order}
            under_test.wait(*answers.values())
            assert [answers[i].token_ids for i in range(40)] == sequential
        under_test.settle()


class ShortCache(LocalCache):
    """Refuses three of four Extends, as if another runner held the blocks."""

    def __init__(self, pool: LocalPool, runner_id: str) -> None:
        super().__init__(pool, runner_id)
        self._rng = random.Random(12)

    def send(self, step: int, completed_step: int, operations: list[Operation]) -> None:
        refused = [isinstance(operation, Extend) and self._rng.random() < 0.75 for operation in operations]
        granted = [operation for operation, no in zip(operations, refused, strict=True) if not no]
        super().send(step, completed_step, granted)
        results = iter(super().receive(0))
        self._answers.append([Shortage(1, 0, 0) if no else next(results) for no in refused])


def test_case_12_preempted_again_and_again_a_sequence_loses_and_doubles_nothing(model: LoadedModel) -> None:
    """Case 12: each sequence preempted >= 3 times: tokens equal the unpreempted run, positions contiguous."""
    prompts = [prompt_of(20, seed=i) for i in range(4)]
    expected = [alone(model, prompt, max_tokens=80) for prompt in prompts]
    with running_engine(model, cache_type=ShortCache) as under_test:
        answers = [under_test.submit(prompt, max_tokens=80) for prompt in prompts]
        assert under_test.wait(*answers) == expected
        assert min(answer.sequence.num_preemptions for answer in answers) >= 3
        under_test.settle()


def test_a_pool_too_small_for_all_makes_the_youngest_give_way(model: LoadedModel) -> None:
    prompts = [prompt_of(20, seed=i) for i in range(6)]
    expected = [alone(model, prompt, max_tokens=60) for prompt in prompts]
    with running_engine(model, num_blocks=24) as under_test:
        answers = [under_test.submit(prompt, max_tokens=60) for prompt in prompts]
        assert under_test.wait(*answers) == expected
        assert answers[0].sequence.num_preemptions == 0
        assert under_test.scheduler.num_preemptions >= 3
        under_test.settle()


def test_a_pool_that_holds_one_sequence_serves_them_one_after_the_other(model: LoadedModel) -> None:
    prompts = [prompt_of(20, seed=i) for i in range(4)]
    with running_engine(model, num_blocks=9) as under_test:
        answers = under_test.wait(*[under_test.submit(prompt, max_tokens=36) for prompt in prompts])
        assert answers == [alone(model, prompt, max_tokens=36) for prompt in prompts]
        under_test.settle()


def test_the_same_answer_follows_after_any_number_of_received_tokens(engine: EngineUnderTest) -> None:
    prompt = prompt_of(21, seed=5)
    whole = engine.wait(engine.submit(prompt, temperature=0.8, seed=3))[0]
    for received in (1, 2, 11, 23):
        resumed = engine.submit(prompt, temperature=0.8, seed=3, generated=tuple(whole[:received]))
        assert engine.wait(resumed) == [whole]
        assert resumed.sequence.num_recomputed_tokens <= 8


def test_a_cancelled_sequence_leaves_nothing_behind(engine: EngineUnderTest, model: LoadedModel) -> None:
    neighbour_prompt = prompt_of(30, seed=8)
    neighbour = engine.submit(neighbour_prompt, max_tokens=60)
    for i in range(12):
        victim = engine.submit(prompt_of(40 + i, seed=100 + i), max_tokens=400)
        if i % 3:
            while len(victim.token_ids) < i:
                engine.steps.get(timeout=30)
        engine.engine.cancel(victim.sequence.id)
    assert engine.wait(neighbour) == [alone(model, neighbour_prompt, max_tokens=60)]


def test_case_22_the_context_limit_and_the_stop_token_end_an_answer(engine: EngineUnderTest) -> None:
    """Case 22: prompt = max - 1 with max_tokens 10: one token, finish reason length; a stop token gives stop."""
    edge = engine.submit(prompt_of(63, seed=3), max_tokens=10, max_context=64)
    engine.wait(edge)
    assert (len(edge.token_ids), edge.finish_reason) == (1, FinishReason.LENGTH)
    free = engine.wait(engine.submit(prompt_of(10, seed=3), max_tokens=10))[0]
    stopped = engine.submit(prompt_of(10, seed=3), max_tokens=10, stop=frozenset({free[4]}))
    engine.wait(stopped)
    assert stopped.token_ids == free[: free.index(free[4])]
    assert stopped.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(("reason", "num_pools"), [("the stream broke", 1), ("closed", 5)])
def test_a_lost_cache_manager_only_makes_streams_pause(model: LoadedModel, reason: str, num_pools: int) -> None:
    prompts = [prompt_of(20 + i, seed=i) for i in range(5)]
    expected = [alone(model, prompt, max_tokens=80) for prompt in prompts]
    with running_engine(model) as under_test:
        answers: list[Answer] = [under_test.submit(prompt, max_tokens=80) for prompt in prompts]
        for _ in range(4):
            for _ in range(12):
                under_test.steps.get(timeout=30)
            under_test.cache.lose(reason)
        assert under_test.wait(*answers) == expected
        assert len(under_test.caches) == num_pools
        under_test.settle()


@pytest.mark.parametrize(("reason", "session"), [("the stream broke", (1, 2)), ("closed", (2, 1))])
def test_an_idle_runner_begins_a_new_session_for_a_lost_one(
    model: LoadedModel, reason: str, session: tuple[int, int]
) -> None:
    with running_engine(model) as under_test:
        under_test.wait(under_test.submit(prompt_of(20, seed=0)))
        under_test.settle()
        under_test.cache.lose(reason)
        deadline = time.monotonic() + 20
        while (len(under_test.caches), under_test.cache.granted.epoch) != session:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        under_test.settle()


def test_blocks_that_a_lost_session_held_come_back_without_another_request(model: LoadedModel) -> None:
    with running_engine(model) as under_test:
        answer = under_test.submit(prompt_of(20, seed=0), max_tokens=300)
        while len(answer.token_ids) < 5:
            under_test.steps.get(timeout=30)
        under_test.engine.cancel(answer.sequence.id)
        under_test.cache.lose()
        under_test.settle()


def test_sequences_hold_no_more_blocks_than_their_tokens_need(engine: EngineUnderTest) -> None:
    answer = engine.submit(prompt_of(20, seed=0), max_tokens=200)
    while len(answer.token_ids) < 100:
        engine.steps.get(timeout=30)
    usage = engine.cache.pool.policy.stats().usage
    assert usage.logical_blocks <= -(-(20 + len(answer.token_ids) + 2) // 8) + 1
    engine.engine.cancel(answer.sequence.id)


def test_who_comes_while_others_are_being_opened_is_computed_with_them(model: LoadedModel) -> None:
    arrivals: list[Callable[[], Answer]] = []

    class BusyCache(LocalCache):
        def receive(self, timeout_s: float) -> list[Result]:
            if arrivals:
                answers.append(arrivals.pop()())
            return super().receive(timeout_s)

    with running_engine(model, cache_type=BusyCache) as under_test:
        under_test.settle()
        arrivals += [partial(under_test.submit, prompt_of(6, seed=i), max_tokens=1) for i in range(4)]
        answers = [under_test.submit(prompt_of(20, seed=9), max_tokens=1)]
        under_test.steps.get(timeout=30)
        under_test.settle()
        assert [len(answer.token_ids) for answer in answers] == [1] * 5
        assert under_test.steps.empty()


def test_a_stopped_engine_has_released_what_it_had(model: LoadedModel) -> None:
    with running_engine(model) as under_test:
        answers = [under_test.submit(prompt_of(21, seed=i), max_tokens=300) for i in range(3)]
        while min(len(answer.token_ids) for answer in answers) < 9:
            under_test.steps.get(timeout=30)
        cache = under_test.cache
    # Found is all that was computed, the part of a block at its end too: the session did not just end.
    policy = cache.pool.policy
    heir = cache.pool.attach()
    for number, answer in enumerate(answers):
        known = prompt_of(21, seed=number) + answer.token_ids
        heir.send(number, number, [Open(SequenceId(number), "t", known, len(known), len(known))])
        (opened,) = heir.receive(0)
        assert isinstance(opened, Opened)
        assert opened.num_cached_tokens >= len(known) - 1
    heir.close()
    assert policy.check_integrity() == []


class SilentCache(LocalCache):
    """Answers while it is told to."""

    def __init__(self, pool: LocalPool, runner_id: str) -> None:
        super().__init__(pool, runner_id)
        self.answers_come = threading.Event()
        self.answers_come.set()

    def receive(self, timeout_s: float) -> list[Result]:
        if not self.answers_come.wait(timeout_s):
            raise TimeoutError
        return super().receive(timeout_s)


def until_activity(under_test: EngineUnderTest, activity: Activity) -> None:
    deadline = time.monotonic() + 20
    while under_test.engine.report().activity is not activity:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not under_test.engine.report().hung


def test_an_idle_engine_shows_that_its_manager_is_silent_and_stops_without_it(model: LoadedModel) -> None:
    with running_engine(model, cache_type=SilentCache) as under_test:
        under_test.wait(under_test.submit(prompt_of(20, seed=0)))
        under_test.settle()
        under_test.cache.answers_come.clear()
        until_activity(under_test, Activity.WAITING_FOR_MANAGER)


def test_an_engine_in_a_long_step_shows_that_its_manager_is_silent_or_gone(model: LoadedModel) -> None:
    devices: list[SlowDevice] = []

    def slow(model: LoadedModel, layout: KvLayout) -> SlowDevice:
        devices.append(SlowDevice(model, layout))
        return devices[-1]

    expected = alone(model, prompt_of(20, seed=0), max_tokens=400)
    with running_engine(model, cache_type=SilentCache, make_device=slow) as under_test:
        answer = under_test.submit(prompt_of(20, seed=0), max_tokens=400)
        for _ in range(2):
            devices[0].hold()
            until_activity(under_test, Activity.IN_STEP)
            under_test.cache.answers_come.clear()
            until_activity(under_test, Activity.WAITING_FOR_MANAGER)
            under_test.cache.answers_come.set()
            until_activity(under_test, Activity.IN_STEP)
            assert not under_test.engine.report().detached
            under_test.cache.lose("closed")
            assert under_test.engine.report().detached
            until_activity(under_test, Activity.WAITING_FOR_MANAGER)
            devices[0].go_on()
        assert under_test.wait(answer) == [expected]
        assert len(under_test.caches) == 3
        under_test.settle()
        assert not under_test.engine.report().detached


def test_waiting_for_the_manager_is_counted_once_the_device_has_nothing_to_do(model: LoadedModel) -> None:
    class SlowCache(LocalCache):
        def receive(self, timeout_s: float) -> list[Result]:
            time.sleep(0.02)
            return super().receive(timeout_s)

    with running_engine(model, cache_type=SlowCache) as under_test:
        under_test.wait(under_test.submit(prompt_of(20, seed=0), max_tokens=3))
        report = under_test.engine.report()
        assert report.manager_wait_seconds > 0.02
        under_test.settle()
