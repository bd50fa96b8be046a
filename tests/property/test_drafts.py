"""A step that was drafted while the one before ran is, word for word, the step that would have been built anew."""

import random
from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.kv_layout import KvLayout
from model_runner.batch import lay_out, write_sampled_tokens
from model_runner.inputs import StepInputs
from model_runner.sampling_params import SamplingParams
from model_runner.scheduler import Scheduler, SchedulerLimits
from model_runner.sequence import Sequence
from model_runner.step import Output, Sampled
from pagekeeper.common.ids import SequenceId
from tests.fakes.local_cache import LocalCache, LocalPool

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, block_size=8, head_dim=1, dtype="float32")
STOP = 9
PLAIN = SamplingParams(0.0, 1.0, 0, 0.0, 0, frozenset({STOP}))
SAMPLING = [
    PLAIN,
    replace(PLAIN, repetition_penalty=1.2, min_tokens=5),
    PLAIN,
    replace(PLAIN, presence_penalty=1.0, bad_words=((1, 1, 2), (2, 1), (1, 2), (7,))),
]


def words_of_extras(inputs: StepInputs) -> list[int]:
    """But for bans that do not hold."""
    extras = inputs.extras
    if extras is None:
        return []
    edits = extras.view(torch.from_numpy(extras.words)).edits
    bans = () if edits.banned is None else edits.banned
    counted = () if edits.penalties is None else (edits.penalties.token_ids, edits.penalties.counts)
    return [number for tensor in (*bans, *counted) for number in tensor.tolist()]


def zeros(num_words: int) -> np.ndarray:
    return np.zeros(num_words, np.int64)  # there may be gaps between the sections


class Runner:
    """The engine's loop over the real policy; what it samples depends on the sequence and the position alone."""

    def __init__(self, num_blocks: int, max_batch_tokens: int, max_sequences: int, *, drafts: bool) -> None:
        self.cache: LocalCache = LocalPool(num_blocks, LAYOUT).attach()
        granted = self.cache.granted
        self.limit = (granted.num_blocks - 1 - granted.watermark_blocks) * LAYOUT.block_size
        self.scheduler = Scheduler(SchedulerLimits(LAYOUT.block_size, max_batch_tokens, max_sequences))
        self.drafts = drafts
        self.num_steps = self.num_used = 0
        self.drafted = None

    def add(
        self, number: int, num_prompt: int, max_tokens: int, temperature: float = 0.0, resumed: tuple[int, ...] = (0,)
    ) -> None:
        """A request with a candidate for each of `resumed`, which has so many generated tokens."""
        num_prompt = min(num_prompt, self.limit - 1)
        total = min(num_prompt + max_tokens, self.limit)
        candidates = [
            Sequence(
                id=SequenceId(number + index),
                tenant="t",
                token_ids=[1] * (num_prompt + min(generated, total - num_prompt - 1)),  # so that blocks fold
                num_prompt_tokens=num_prompt,
                max_total_tokens=total,
                sampling=replace(SAMPLING[number // 10 % len(SAMPLING)], temperature=temperature, seed=number),
                candidate=index,
            )
            for index, generated in enumerate(resumed)
        ]
        self.scheduler.add(*candidates)

    def step(self) -> tuple[list[int], list[Output]]:
        """Returns the words that the device is given, and the outputs."""
        self.num_steps += 1
        step = self.scheduler.schedule()
        inputs = lay_out(step, LAYOUT.block_size, zeros)
        if self.drafted is not None and self.drafted[0] is step:
            self.num_used += 1
            write_sampled_tokens(self.drafted[1], step)
            assert np.array_equal(self.drafted[1].words, inputs.words)
            assert words_of_extras(self.drafted[1]) == words_of_extras(inputs)
            inputs = self.drafted[1]
        _, sampled = step.samples()
        tokens = [self.sample(s.id, len(s.token_ids)) for s in sampled]
        self.cache.send(self.num_steps, self.num_steps - bool(step.entries), self.scheduler.plan())
        self.scheduler.apply(self.cache.receive(0))
        self.scheduler.advance(step)
        self.drafted = None
        if self.drafts:
            draft = self.scheduler.draft()
            self.drafted = (draft, lay_out(draft, LAYOUT.block_size, zeros))
        return inputs.words.tolist(), self.scheduler.complete(Sampled(tokens))

    @staticmethod
    def sample(sequence: int, position: int) -> int:
        rng = random.Random(sequence * 1_000_003 + position)
        return STOP if rng.random() < 0.03 else 1 + (rng.random() < 0.1)


arrivals = st.tuples(
    st.integers(1, 60),
    st.integers(1, 40),
    st.sampled_from([0.0, 0.7]),
    st.lists(st.sampled_from([0, 0, 0, 5]), min_size=1, max_size=4).map(tuple),
    st.integers(0, 5),
    st.lists(st.integers(0, 3), max_size=2),
)


@settings(max_examples=40, deadline=None)
@given(
    requests=st.lists(arrivals, min_size=1, max_size=10),
    num_blocks=st.integers(6, 24),
    max_batch_tokens=st.integers(4, 64),
    max_sequences=st.integers(1, 8),
)
def test_a_draft_is_the_step_that_would_have_been_built_anew(
    requests: list[tuple[int, int, float, tuple[int, ...], int, list[int]]],
    num_blocks: int,
    max_batch_tokens: int,
    max_sequences: int,
) -> None:
    twins = [Runner(num_blocks, max_batch_tokens, max_sequences, drafts=drafts) for drafts in (True, False)]

    def step() -> None:
        (words, outputs), (expected_words, expected) = (twin.step() for twin in twins)
        assert words == expected_words
        assert [(o.sequence.id, *o[1:]) for o in outputs] == [(o.sequence.id, *o[1:]) for o in expected]

    for number, (num_prompt, max_tokens, temperature, resumed, pause, cancels) in enumerate(requests, start=1):
        for twin in twins:
            twin.add(10 * number, num_prompt, max_tokens, temperature, resumed)
        for _ in range(pause):
            step()
        for index in cancels:
            for twin in twins:
                twin.scheduler.cancel(SequenceId(10 * (number - index % 2) + index))
    for _ in range(2000):
        if not any(twin.scheduler.has_work for twin in twins):
            break
        step()
    assert not any(twin.scheduler.has_work for twin in twins)


def test_most_steps_of_a_decoding_batch_are_drafted_and_an_end_drops_one_draft() -> None:
    runner = Runner(64, 64, 8, drafts=True)
    for number in range(1, 5):
        runner.add(number, num_prompt=6, max_tokens=40)
    while runner.scheduler.has_work:
        runner.step()
    assert runner.num_used >= runner.num_steps - 10
