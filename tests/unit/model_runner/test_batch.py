"""A step's inputs, against lists made one token at a time."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.interface import PADDING_SLOT
from kernels.kv_layout import NULL_BLOCK
from model_runner.batch import DeviceBatch, lay_out, view_batch
from model_runner.block_table import BlockTable
from model_runner.sampler import SampleRequest, sampling_batch
from model_runner.sampling_params import SamplingParams
from model_runner.sequence import Sequence
from model_runner.step import Scheduled, Siblings, Step
from pagekeeper.common.ids import BlockId, SequenceId
from pagekeeper.common.operations import BlockCopy, BlockRef

SIZE = 8


def sequence_of(rng: random.Random, num_known: int, num_computed: int) -> Sequence:
    greedy = rng.random() < 0.5
    params = SamplingParams(
        temperature=0.0 if greedy else rng.choice([0.5, 1.0]),
        top_p=rng.choice([1.0, 0.9]),
        top_k=rng.choice([0, 5]),
        min_p=rng.choice([0.0, 0.1]),
        seed=rng.choice([0, 7, 2**63 + 5, 2**64 - 1]),
        stop_token_ids=frozenset(),
    )
    blocks = [BlockRef(BlockId(rng.randrange(1, 2**40)), 1) for _ in range(-(-num_known // SIZE) + rng.randrange(2))]
    return Sequence(
        id=SequenceId(1),
        tenant="t",
        token_ids=rng.choices(range(1000), k=num_known),
        num_prompt_tokens=rng.randrange(1, num_known + 1),
        max_total_tokens=10_000,
        sampling=params,
        candidate=rng.randrange(3),
        block_table=BlockTable(blocks),
        num_computed=num_computed,
    )


def random_step(seed: int, *, decodes_only: bool = False) -> Step:
    rng = random.Random(seed)
    entries = []
    for _ in range(rng.randrange(0 if decodes_only else 1, 7)):
        num_known = rng.randrange(1, 40)
        num_tokens = 1 if decodes_only or rng.random() < 0.5 else rng.randrange(1, num_known + 1)
        # Not every chunk reaches the last known token, and not every single token is the last known one.
        num_computed = rng.choice([num_known - num_tokens, rng.randrange(num_known - num_tokens + 1)])
        entries.append(Scheduled(sequence_of(rng, num_known, num_computed), num_tokens))
    refs = [BlockRef(BlockId(i), 1) for i in rng.sample(range(1, 99), k=2 * rng.randrange(3))]
    copies = [BlockCopy(0, source, destination, 1) for source, destination in zip(refs[::2], refs[1::2], strict=True)]
    return Step(sorted(entries, key=lambda entry: entry.num_tokens > 1), copies)


def poisoned(num_words: int) -> np.ndarray:
    return np.full(num_words, -77, np.int64)


def batch_of(step: Step, **options: int | None) -> DeviceBatch:
    inputs = lay_out(step, SIZE, poisoned, **options)
    assert len(inputs.words) == inputs.layout.num_words
    return view_batch(inputs, torch.from_numpy(inputs.words))


def check(batch: DeviceBatch, step: Step, padding: int = 0) -> None:
    """Compare with what the definition of each field says of each token."""
    attention, entries = batch.attention, step.entries
    computed = [(e.sequence, range(e.sequence.num_computed, e.sequence.num_computed + e.num_tokens)) for e in entries]
    ends = [positions.stop for _, positions in computed]
    tables = [[block.id for block in s.block_table.blocks[: -(-p.stop // SIZE)]] for s, p in computed]
    width = max(map(len, tables), default=0)
    assert batch.token_ids.tolist() == [s.token_ids[i] for s, p in computed for i in p] + [0] * padding
    assert batch.positions.tolist() == [i for _, p in computed for i in p] + [0] * padding
    slots = [s.block_table.blocks[i // SIZE].id * SIZE + i % SIZE for s, p in computed for i in p]
    assert attention.slot_mapping.tolist() == slots + [PADDING_SLOT] * padding
    padded = [table + [NULL_BLOCK] * (width - len(table)) for table in tables] + [[NULL_BLOCK] * width] * padding
    assert attention.block_tables.tolist() == padded
    lengths = [len(p) for _, p in computed] + [1] * padding
    assert attention.query_lengths == lengths
    assert attention.query_starts.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert attention.context_ends.tolist() == attention.context_lengths == ends + [0] * padding
    assert attention.num_decodes == lengths.count(1)
    sampled = [row for row, entry in enumerate(entries) if entry.samples]
    last_rows = [sum(lengths[: row + 1]) - 1 for row in sampled]
    assert batch.logit_rows[: len(sampled)].tolist() == last_rows
    requests = [
        SampleRequest(s.sampling, s.candidate, s.num_generated_tokens) for s in (entries[r].sequence for r in sampled)
    ]
    expected = sampling_batch(requests)
    assert (batch.sampling.all_greedy, batch.sampling.filters) == (expected.all_greedy, expected.filters)
    for name in ("temperature", "top_k", "top_p", "min_p", "seed", "candidate", "position"):
        assert getattr(batch.sampling, name)[: len(sampled)].equal(getattr(expected, name))
        assert getattr(batch.sampling, name).is_contiguous()
    assert batch.copies.tolist() == [[copy.source.id, copy.destination.id] for copy in step.copies]


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_field_is_what_the_sequences_say(seed: int) -> None:
    step = random_step(seed)
    check(batch_of(step), step)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), padding=st.integers(0, 5))
def test_padding_computes_nothing_and_samples_greedily(seed: int, padding: int) -> None:
    step = random_step(seed, decodes_only=True)
    batch = batch_of(step, padded_to=len(step.entries) + padding)
    check(batch, step, padding)
    num_samples = sum(entry.samples for entry in step.entries)
    assert len(batch.logit_rows) == len(step.entries) + padding
    assert not batch.logit_rows[num_samples:].any()
    assert not batch.sampling.temperature[num_samples:].any()


@pytest.mark.parametrize("seed", range(20))
def test_every_section_begins_on_16_bytes(seed: int) -> None:
    batch = batch_of(random_step(seed))
    tensors = [value for part in (batch, batch.attention, batch.sampling) for value in vars(part).values()]
    first = batch.token_ids.data_ptr()
    pointers = [tensor.data_ptr() for tensor in tensors if isinstance(tensor, torch.Tensor) and len(tensor)]
    assert all((pointer - first) % 16 == 0 for pointer in pointers)


def test_a_step_of_copies_alone_has_no_tokens() -> None:
    step = Step([], [BlockCopy(0, BlockRef(BlockId(4), 1), BlockRef(BlockId(9), 1), 3)])
    batch = batch_of(step)
    assert batch.copies.tolist() == [[4, 9]]
    assert len(batch.token_ids) == len(batch.logit_rows) == 0


@pytest.mark.parametrize(("looks", "expected"), [(True, [32]), (False, None)])
def test_shared_blocks_are_named_where_they_are_of_use(looks: bool, expected: list[int] | None) -> None:
    rng = random.Random(0)
    prefix = [BlockRef(BlockId(i), 1) for i in range(1, 33)]
    sequences = [sequence_of(rng, 32 * SIZE + 5, 32 * SIZE + 4) for _ in range(40)]
    for i, sequence in enumerate(sequences):
        sequence.block_table.resize(0, [*prefix, BlockRef(BlockId(100 + i), 1)])
    inputs = lay_out(Step([Scheduled(s, 1) for s in sequences], []), SIZE, padded_to=48, look_for_sharing=looks)
    shared = view_batch(inputs, torch.from_numpy(inputs.words)).attention.shared_blocks
    assert (shared if shared is None else shared.tolist()) == expected


@pytest.mark.parametrize("padded_to", [None, 8])
def test_siblings_sample_from_the_logits_of_the_sequence_they_part_from(padded_to: int | None) -> None:
    rng = random.Random(3)
    decode, parting, partial = (sequence_of(rng, 20, num_computed) for num_computed in (19, 19, 3))
    siblings = [sequence_of(rng, 20, 19) for _ in range(2)]
    entries = [Scheduled(decode, 1), Scheduled(parting, 1), Scheduled(partial, 1)]
    inputs = lay_out(Step(entries, [], [Siblings(1, siblings)]), SIZE, padded_to=padded_to)
    batch = view_batch(inputs, torch.from_numpy(inputs.words))
    assert inputs.num_samples == 4
    assert batch.logit_rows[:4].tolist() == [0, 1, 1, 1]
    assert batch.sampling.candidate[:4].tolist() == [s.candidate for s in (decode, parting, *siblings)]
    assert len(batch.logit_rows) == (padded_to or 4)
