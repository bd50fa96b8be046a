"""Random arrivals and cancels on a small pool: whatever fits runs, and everything ends."""

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernels.kv_layout import KvLayout
from model_runner.beam_group import BeamGroup, most_blocks
from model_runner.beam_search import BeamSearch, BeamSearchParams, EarlyStopping
from model_runner.sampling_params import SamplingParams
from model_runner.scheduler import Scheduler, SchedulerLimits
from model_runner.sequence import Sequence
from model_runner.step import BeamsOutput, Continuations, Sampled, Step
from pagekeeper.common.ids import SequenceId
from pagekeeper.common.operations import Operation
from tests.fakes.local_cache import LocalCache, LocalPool

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, block_size=8, head_dim=1, dtype="float32")
STOP = 9
# Blocks that give way come back with the third message after the one that was refused.
MOST_STEPS_WITHOUT_WORK = 4


class Memory:
    """The pool as a device sees it: in each slot which tokens, up to its own, were written there."""

    def __init__(self) -> None:
        self.slots: dict[tuple[int, int], int] = {}

    def run(self, step: Step) -> None:
        """Copy, write, and check that every token sees its own past."""
        size = LAYOUT.block_size
        sources = {copy.source.id for copy in step.copies}
        destinations = [copy.destination.id for copy in step.copies]
        assert len(set(destinations)) == len(destinations)
        assert sources.isdisjoint(destinations)
        for copy in step.copies:
            for slot in range(size):
                self.slots[copy.destination.id, slot] = self.slots.get((copy.source.id, slot), 0)
        for sequence, num_tokens in step.entries:
            table, last = sequence.block_table.ids, sequence.num_computed + num_tokens
            for position in range(sequence.num_computed, last):
                past = hash(tuple(sequence.token_ids[: position + 1]))
                self.slots[int(table[position // size]), position % size] = past
        for sequence, num_tokens in step.entries:
            table, last = sequence.block_table.ids, sequence.num_computed + num_tokens
            for position in range(last):
                past = hash(tuple(sequence.token_ids[: position + 1]))
                assert self.slots[int(table[position // size]), position % size] == past


class Runner:
    """The engine's loop over the real policy, with a device that only keeps account of what it writes where."""

    def __init__(self, pool: LocalPool, max_batch_tokens: int, max_sequences: int) -> None:
        self.cache: LocalCache = pool.attach()
        granted = self.cache.granted
        self.num_blocks = granted.num_blocks - 1 - granted.watermark_blocks
        self.limit = self.num_blocks * LAYOUT.block_size
        self.max_sequences = max_sequences
        self.scheduler = Scheduler(SchedulerLimits(LAYOUT.block_size, max_batch_tokens, max_sequences))
        self.memory = Memory()
        self.step_number = 0
        self.steps_without_work = 0
        self.added: set[int] = set()
        self.ended: set[int] = set()

    def add(
        self,
        number: int,
        num_prompt: int,
        max_tokens: int,
        priority: int = 0,
        first_token: int = 1,
        resumed: tuple[int, ...] = (0,),
    ) -> list[Sequence]:
        """A request with a candidate for each of `resumed`, which has so many generated tokens."""
        num_prompt = min(num_prompt, self.limit - 1)
        total = min(num_prompt + max_tokens, self.limit)
        candidates = [
            self._sequence(number + i, num_prompt, total, priority, first_token, min(generated, total - num_prompt - 1))
            for i, generated in enumerate(resumed)
        ]
        self.added |= {candidate.id for candidate in candidates}
        self.scheduler.add(*candidates)
        return candidates

    def search(self, number: int, num_prompt: int, max_tokens: int, priority: int, width: int) -> list[Sequence]:
        """A beam search, as wide as may ever fit."""
        num_prompt = min(num_prompt, self.limit - 1)
        total = min(num_prompt + max_tokens, self.limit)
        width = min(width, self.max_sequences)
        while most_blocks(width, num_prompt, total, LAYOUT.block_size) > self.num_blocks:
            width -= 1
        params = BeamSearchParams(width, 1.0, EarlyStopping.FALSE, width, intermediate=False)
        beams = [self._sequence(number + i, num_prompt, total, priority, 1, 0) for i in range(width)]
        group = BeamGroup(BeamSearch(params, frozenset({STOP}), total - num_prompt), beams)
        for beam in beams:
            beam.beams, beam.num_continuations = group, group.search.num_continuations
        self.added.add(beams[0].id)
        self.scheduler.add(*beams)
        return beams

    @staticmethod
    def _sequence(
        number: int, num_prompt: int, total: int, priority: int, first_token: int, generated: int
    ) -> Sequence:
        return Sequence(
            id=SequenceId(number),
            tenant="t",
            token_ids=[first_token] * num_prompt + [token_of(number, i) for i in range(generated)],
            num_prompt_tokens=num_prompt,
            max_total_tokens=total,
            sampling=SamplingParams(0.0, 1.0, 0, 0.0, 0, frozenset({STOP})),
            priority=priority,
            num_resumed_tokens=generated,
            was_computed=num_prompt + generated - 1 if generated else 0,
        )

    def step(self) -> None:
        self.step_number += 1
        step = self.scheduler.schedule()
        assert len(step.entries) <= self.max_sequences
        self.memory.run(step)
        self.exchange(bool(step.entries), self.scheduler.plan())
        _, sampling = step.samples()
        assert len(sampling) <= self.max_sequences
        self.scheduler.advance(step)
        tokens = [token_of(s.id, s.num_generated_tokens) for s in sampling]
        continuations = {i: continuations_of(s) for i, s in enumerate(sampling) if s.beams is not None}
        for output in self.scheduler.complete(Sampled(tokens, continuations=continuations)):
            if isinstance(output, BeamsOutput):
                self.ended.add(output.leader.id)
            elif output.finish_reason is not None:
                self.ended.add(output.sequence.id)
        if operations := self.scheduler.plan_beams():
            self.exchange(False, operations)
        waits = bool(self.scheduler.waiting) and not step.entries
        self.steps_without_work = self.steps_without_work + 1 if waits else 0
        assert self.steps_without_work <= MOST_STEPS_WITHOUT_WORK

    def exchange(self, in_flight: bool, operations: list[Operation]) -> None:
        self.cache.send(self.step_number, self.step_number - in_flight, operations)
        self.scheduler.apply(self.cache.receive(0))

    def cancel(self, sequence: SequenceId) -> None:
        """What was granted may be let go unused, so waiting begins anew."""
        self.scheduler.cancel(sequence)
        self.steps_without_work = 0

    def lose_session(self) -> None:
        """Begin another one; the blocks of the old one come back with its first message, so waiting begins anew."""
        self.cache.lose()
        self.cache.reattach(0)
        self.scheduler.restart()
        self.steps_without_work = 0

    def run(self) -> None:
        """Until nothing is left; then everything must be free."""
        for _ in range(5000):
            if not self.scheduler.has_work:
                break
            self.step()
        for _ in range(3):
            self.step()
        policy = self.cache.pool.policy
        assert policy.stats().pool.free_blocks == self.cache.granted.num_blocks - 1
        assert policy.check_integrity() == []


def token_of(sequence: int, position: int) -> int:
    """Candidates part sooner or later, and now and then one stops."""
    rng = random.Random(sequence * 1_000_003 + position)
    return STOP if rng.random() < 0.03 else 1 + (rng.random() < 0.3)


def continuations_of(beam: Sequence) -> Continuations:
    """Hang on the tokens alone, as a model's would."""
    rng = random.Random(hash(tuple(beam.token_ids)))
    tokens = rng.sample(range(1, 40), k=beam.num_continuations)
    return sorted(((token, -rng.expovariate(0.5)) for token in tokens), key=lambda entry: -entry[1])


arrivals = st.tuples(
    st.integers(1, 60), st.integers(1, 40), st.integers(-1, 1), st.integers(1, 3), st.integers(0, 5), st.booleans()
)


# Each of three is cancelled when it could have run in the next step.
@example([(1, 1, 0, 1, 0, False), *[(1, 1, 0, 1, 1, True)] * 3, (25, 1, -1, 1, 0, False)], 6, 4, 1)
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
    runner = Runner(LocalPool(num_blocks, LAYOUT), max_batch_tokens, max_sequences)
    cancelled = set()
    for number, (num_prompt, max_tokens, priority, first_token, pause, cancels) in enumerate(requests, start=1):
        runner.add(number, num_prompt, max_tokens, priority, first_token)
        for _ in range(pause):
            runner.step()
        if cancels and number > 1:
            cancelled.add(number - 1)
            runner.cancel(SequenceId(number - 1))
    runner.run()
    assert runner.ended | cancelled == runner.added


groups = st.tuples(
    st.integers(1, 40),
    st.integers(1, 24),
    st.integers(-1, 1),
    st.one_of(st.integers(1, 4), st.lists(st.integers(0, 12), min_size=1, max_size=6).map(tuple)),
    st.integers(0, 6),
    st.lists(st.integers(0, 5), max_size=3),
)


@settings(max_examples=80, deadline=None)
@given(
    requests=st.lists(groups, min_size=1, max_size=6),
    num_blocks=st.integers(8, 24),
    max_batch_tokens=st.integers(4, 64),
    max_sequences=st.integers(1, 8),
    restarts_after=st.integers(0, 40),
)
def test_candidates_and_beams_keep_their_past_and_end_whatever_is_cancelled_or_lost(
    requests: list[tuple[int, int, int, int | tuple[int, ...], int, list[int]]],
    num_blocks: int,
    max_batch_tokens: int,
    max_sequences: int,
    restarts_after: int,
) -> None:
    runner = Runner(LocalPool(num_blocks, LAYOUT), max_batch_tokens, max_sequences)
    cancelled = set()
    for number, (num_prompt, max_tokens, priority, shape, pause, cancels) in enumerate(requests, start=1):
        if isinstance(shape, int):
            sequences = runner.search(10 * number, num_prompt, max_tokens, priority, shape)
        else:
            sequences = runner.add(10 * number, num_prompt, max_tokens, priority, resumed=shape)
        for _ in range(pause):
            runner.step()
        for index in cancels:
            cancelled.add(sequences[min(index, len(sequences) - 1) if isinstance(shape, tuple) else 0].id)
            runner.cancel(sequences[min(index, len(sequences) - 1)].id)
        if runner.step_number > restarts_after:
            restarts_after = 5000
            runner.lose_session()
    runner.run()
    assert runner.ended | cancelled == runner.added


@pytest.mark.parametrize("steps_before", [0, 1, 2, 5])
def test_case_16_a_cancelled_sequence_gives_its_blocks_back_within_two_steps(steps_before: int) -> None:
    """Case 16: reset while queued, in prefill, in decode: blocks back within two steps."""
    pool = LocalPool(20, LAYOUT)
    runner = Runner(pool, max_batch_tokens=16, max_sequences=4)
    runner.add(1, num_prompt=40, max_tokens=40, priority=0, first_token=1)
    for _ in range(steps_before):
        runner.step()
    runner.cancel(SequenceId(1))
    for _ in range(2):
        runner.step()
    assert pool.policy.stats().usage.sequences == 0
    assert pool.policy.stats().pool.free_blocks == 19
