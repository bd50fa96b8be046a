"""What is given up while a step may still write to it is nobody else's before that step has ended."""

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kernels.kv_layout import KvLayout
from model_runner.model.load import LoadedModel
from tests.fakes.engine import BLOCK_SIZE, Answer, EngineUnderTest, load_tiny, running_engine
from tests.fakes.local_cache import LocalPool
from tests.fakes.slow_device import SlowDevice
from tests.models import write_tiny_model

NUM_BLOCKS = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 384), k=length)


def alone(model: LoadedModel, prompt: list[int], max_tokens: int) -> list[int]:
    with running_engine(model) as under_test:
        return under_test.wait(under_test.submit(prompt, max_tokens))[0]


def until_running(engine: EngineUnderTest, answer: Answer, num_tokens: int) -> None:
    while len(answer.token_ids) < num_tokens:
        engine.steps.get(timeout=30)


def until_refused(engine: EngineUnderTest) -> None:
    """The cache manager has answered, and has no blocks for who waits."""
    shortages = engine.cache.pool.policy.stats().counters.shortages
    deadline = time.monotonic() + 30
    while engine.cache.pool.policy.stats().counters.shortages < shortages + 3:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def shared(model: LoadedModel) -> Iterator[tuple[EngineUnderTest, SlowDevice, EngineUnderTest]]:
    """Two runners on one pool; the device of the first can be stopped."""
    pool = LocalPool(NUM_BLOCKS, model.kv_layout(BLOCK_SIZE))
    devices: list[SlowDevice] = []

    def slow(model: LoadedModel, layout: KvLayout) -> SlowDevice:
        devices.append(SlowDevice(model, layout))
        return devices[-1]

    with ExitStack() as stack:
        first = stack.enter_context(running_engine(model, pool=pool, make_device=slow))
        stack.callback(devices[0].go_on)
        second = stack.enter_context(running_engine(model, pool=pool))
        yield first, devices[0], second
        devices[0].go_on()
        first.settle()


@pytest.mark.parametrize("has_neighbour", [False, True])
def test_case_08_what_is_aborted_while_a_step_writes_is_reused_only_after_that_step(
    model: LoadedModel, shared: tuple[EngineUnderTest, SlowDevice, EngineUnderTest], has_neighbour: bool
) -> None:
    """Case 8: delay a step, abort, reuse the blocks: the new request equals its solo run."""
    first, device, second = shared
    new_prompt = prompt_of(130, seed=99)  # needs most of the pool
    expected, beside = alone(model, new_prompt, 8), alone(model, prompt_of(9, seed=2), 20)
    for round_ in range(8):
        neighbour = first.submit(prompt_of(9, seed=2), 20) if has_neighbour else None
        victim = first.submit(prompt_of(40 + round_, seed=round_), 100)
        until_running(first, victim, 3 + round_)
        if round_ % 2:
            device.hold()
            first.engine.cancel(victim.sequence.id)
            heir = second.submit(new_prompt, 8)
            until_refused(second)
            assert heir.token_ids == []
            device.go_on()
        else:
            first.engine.cancel(victim.sequence.id)
            heir = second.submit(new_prompt, 8)
        assert second.wait(heir) == [expected]
        if neighbour is not None:
            assert first.wait(neighbour) == [beside]
