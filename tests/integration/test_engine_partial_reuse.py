"""Reusing part of a block changes no answer: conversations, prompts that part inside a block, many at once."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from model_runner.model.load import LoadedModel
from tests.fakes.engine import Answer, EngineUnderTest, load_tiny, running_engine
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


def alone(model: LoadedModel, prompt: list[int], **options: float) -> list[int]:
    with running_engine(model) as under_test:
        return under_test.wait(under_test.submit(prompt, **options))[0]


def served(engine: EngineUnderTest, prompt: list[int], **options: float) -> Answer:
    """Until the answer has ended and what it leaves behind can be found."""
    answer = engine.submit(prompt, **options)
    engine.wait(answer)
    engine.settle()
    return answer


def test_the_next_turn_of_a_conversation_takes_all_but_its_last_token_from_the_cache(
    engine: EngineUnderTest, model: LoadedModel
) -> None:
    conversation, num_computed = prompt_of(21, seed=1), 0
    for turn in range(4):
        answer = served(engine, conversation, max_tokens=13)
        assert answer.token_ids == alone(model, conversation, max_tokens=13)
        assert answer.sequence.num_cached_tokens == num_computed
        num_computed = len(conversation) + len(answer.token_ids) - 1
        conversation = conversation + answer.token_ids + prompt_of(3 + turn, seed=2 + turn)


@pytest.mark.parametrize("common", [1, 7, 8, 9, 23, 39])
def test_a_prompt_that_parts_inside_a_block_is_answered_as_if_it_were_the_first(
    engine: EngineUnderTest, model: LoadedModel, common: int
) -> None:
    first = prompt_of(40, seed=5)
    served(engine, first)
    other = [*first[:common], 2, *prompt_of(9, seed=6)]
    answer = served(engine, other, temperature=0.8, seed=3)
    assert answer.sequence.num_cached_tokens == common
    assert answer.token_ids == alone(model, other, temperature=0.8, seed=3)


def test_a_source_that_is_copied_from_many_times_at_once_gives_each_its_own_answer(
    engine: EngineUnderTest, model: LoadedModel
) -> None:
    first = prompt_of(30, seed=7)
    served(engine, first, max_tokens=1)
    prompts = [[*first[: 25 + i % 5], 2, *prompt_of(1 + i, seed=i)] for i in range(12)]
    answers = [engine.submit(prompt) for prompt in prompts]
    assert engine.wait(*answers) == [alone(model, prompt) for prompt in prompts]
    # Who is opened later may find more, of those who were opened first.
    assert all((answer.sequence.num_cached_tokens or 0) >= 25 + i % 5 for i, answer in enumerate(answers))


def test_a_cancelled_answer_leaves_a_tail_that_is_right(engine: EngineUnderTest, model: LoadedModel) -> None:
    prompt = prompt_of(21, seed=8)
    expected = alone(model, prompt, max_tokens=60)
    for received in (3, 6, 10, 13):
        cancelled = engine.submit(prompt, max_tokens=60)
        while len(cancelled.token_ids) < received:
            engine.steps.get(timeout=30)
        engine.engine.cancel(cancelled.sequence.id)
        engine.settle()
        assert served(engine, prompt, max_tokens=60).token_ids == expected


def test_a_pool_short_of_blocks_still_gives_the_right_answers(model: LoadedModel) -> None:
    shared = prompt_of(13, seed=9)
    prompts = [[*shared[: 5 + i], *prompt_of(12, seed=20 + i)] for i in range(8)]
    with running_engine(model, num_blocks=20) as under_test:
        for _ in range(3):
            answers = [under_test.submit(prompt, max_tokens=40) for prompt in prompts]
            assert under_test.wait(*answers) == [alone(model, prompt, max_tokens=40) for prompt in prompts]
        assert under_test.scheduler.num_preemptions > 0
        under_test.settle()
