"""Random arrivals and cancels on a small pool: whatever fits runs, and everything ends."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.kv_layout import KvLayout
from model_runner.scheduler import Scheduler, SchedulerLimits
from model_runner.sequence import SamplingParams, Sequence
from model_runner.step import Sampled
from pagekeeper.common.ids import SequenceId
from tests.fakes.local_cache import LocalCache, LocalPool

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, block_size=8, head_dim=1, dtype="float32")
# Blocks that give way come back with the third message after the one that was refused.
MOST_STEPS_WITHOUT_WORK = 4


class Runner:
    """The engine's loop over the real policy, with a device that always samples the same token."""

    def __init__(self, pool: LocalPool, max_batch_tokens: int, max_sequences: int) -> None:
        self.cache: LocalCache = pool.attach()
        granted = self.cache.granted
        self.limit = (granted.num_blocks - 1 - granted.watermark_blocks) * LAYOUT.block_size
        self.scheduler = Scheduler(SchedulerLimits(LAYOUT.block_size, max_batch_tokens, max_sequences))
        self.step_number = 0
        self.steps_without_work = 0
        self.ended: set[int] = set()

    def add(self, number: int, num_prompt: int, max_tokens: int, priority: int, first_token: int) -> None:
        num_prompt = min(num_prompt, self.limit - 1)
        params = SamplingParams(0.0, 1.0, 0, 0.0, 0, frozenset())
        self.scheduler.add(
            Sequence(
                id=SequenceId(number),
                tenant="t",
                token_ids=[first_token] * num_prompt,
                num_prompt_tokens=num_prompt,
                max_total_tokens=min(num_prompt + max_tokens, self.limit),
                sampling=params,
                priority=priority,
            )
        )

    def step(self) -> None:
        self.step_number += 1
        step = self.scheduler.schedule()
        operations = self.scheduler.plan()
        self.cache.send(self.step_number, self.step_number - bool(step.entries), operations)
        self.scheduler.apply(self.cache.receive(0))
        num_samples = sum(entry.samples for entry in step.entries)
        self.scheduler.advance(step)
        for output in self.scheduler.complete(Sampled([5] * num_samples)):
            if output.finish_reason is not None:
                self.ended.add(output.sequence.id)
        waits = bool(self.scheduler.waiting) and not step.entries
        self.steps_without_work = self.steps_without_work + 1 if waits else 0
        assert self.steps_without_work <= MOST_STEPS_WITHOUT_WORK


arrivals = st.tuples(
    st.integers(1, 60), st.integers(1, 40), st.integers(-1, 1), st.integers(1, 3), st.integers(0, 5), st.booleans()
)


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(arrivals, min_size=1, max_size=12),
    num_blocks=st.integers(6, 20),
    max_batch_tokens=st.integers(4, 64),
    max_sequences=st.integers(1, 8),
)
def test_case_13_something_runs_whenever_something_waits(
    requests: list[tuple[int, int, int, int, int, bool]], num_blocks: int, max_batch_tokens: int, max_sequences: int
) -> None:
    """Case 13: random arrivals and cancels: never waiting > 0 with nothing running and a request that fits."""
    pool = LocalPool(num_blocks, LAYOUT)
    runner = Runner(pool, max_batch_tokens, max_sequences)
    cancelled = set()
    for number, (num_prompt, max_tokens, priority, first_token, pause, cancels) in enumerate(requests, start=1):
        runner.add(number, num_prompt, max_tokens, priority, first_token)
        for _ in range(pause):
            runner.step()
        if cancels and number > 1:
            cancelled.add(number - 1)
            runner.scheduler.cancel(SequenceId(number - 1))
    for _ in range(5000):
        if not runner.scheduler.has_work:
            break
        runner.step()
    assert runner.ended | cancelled == set(range(1, len(requests) + 1))
    for _ in range(3):
        runner.step()
    assert pool.policy.stats().pool.free_blocks == num_blocks - 1
    assert pool.policy.check_integrity() == []


@pytest.mark.parametrize("steps_before", [0, 1, 2, 5])
def test_case_16_a_cancelled_sequence_gives_its_blocks_back_within_two_steps(steps_before: int) -> None:
    """Case 16: reset while queued, in prefill, in decode: blocks back within two steps."""
    pool = LocalPool(20, LAYOUT)
    runner = Runner(pool, max_batch_tokens=16, max_sequences=4)
    runner.add(1, num_prompt=40, max_tokens=40, priority=0, first_token=1)
    for _ in range(steps_before):
        runner.step()
    runner.scheduler.cancel(SequenceId(1))
    for _ in range(2):
        runner.step()
    assert pool.policy.stats().usage.sequences == 0
    assert pool.policy.stats().pool.free_blocks == 19
