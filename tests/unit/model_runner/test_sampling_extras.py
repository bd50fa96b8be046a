"""What only some requests ask of a step, from the sequences to the logits: against rules said in plain Python."""

import itertools
import math
from collections import Counter
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference
from model_runner.batch import lay_out, view_batch, write_sampled_tokens
from model_runner.block_table import BlockTable
from model_runner.choice import bring, choose
from model_runner.inputs import StepInputs
from model_runner.sampling_params import SamplingParams
from model_runner.sequence import Sequence
from model_runner.step import Sampled, Scheduled, Step
from model_runner.token_counts import TokenCounts
from pagekeeper.common.ids import BlockId, SequenceId
from pagekeeper.common.operations import BlockRef
from tests.plain_sampling import Row, edited, log_softmax

VOCAB = 12
PLAIN = SamplingParams(0.0, 1.0, 0, 0.0, 0, frozenset())
PLACEHOLDER = 0
TOKENS = st.integers(0, VOCAB - 1)
ASKING = st.builds(
    replace,
    st.just(PLAIN),
    stop_token_ids=st.frozensets(TOKENS, max_size=2),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 1.7]),
    presence_penalty=st.sampled_from([0.0, 0.0, -1.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.4]),
    logit_bias=st.dictionaries(TOKENS, st.sampled_from([-3.5, 100.0, -math.inf]), max_size=3),
    allowed_token_ids=st.lists(TOKENS, max_size=5, unique=True).map(tuple),
    bad_words=st.lists(st.lists(TOKENS, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
    min_tokens=st.integers(0, 4),
    logprobs=st.none() | st.integers(0, VOCAB + 1),
)
TEXTS = st.tuples(st.lists(TOKENS, min_size=1, max_size=5), st.lists(TOKENS, max_size=7))


def decoding(params: SamplingParams, prompt: list[int], answer: list[int], **fields: object) -> Sequence:
    """A sequence of which all but the last token are computed."""
    known = [*prompt, *answer]
    table = BlockTable([BlockRef(BlockId(i), 1) for i in range(1, 2 + len(known))])
    return Sequence(
        SequenceId(1),
        "t",
        known,
        len(prompt),
        99,
        params,
        block_table=table,
        num_computed=len(known) - 1,
        **fields,
    )


def zeros(num_words: int) -> np.ndarray:
    return np.zeros(num_words, np.int64)  # there may be gaps between the sections


def step_of(sequences: list[Sequence]) -> Step:
    return Step([Scheduled(sequence, 1) for sequence in sequences], [])


def run(inputs: StepInputs, logits: torch.Tensor, kernels: ModuleType = reference) -> Sampled:
    extras = None if inputs.extras is None else torch.from_numpy(inputs.extras.words)
    batch = view_batch(inputs, torch.from_numpy(inputs.words), extras)
    choice = choose(logits, batch.sampling, batch.extras, kernels)
    return bring(choice.token_ids.tolist(), inputs.extras, choice)


def random_logits(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.tuples(st.just(PLAIN) | ASKING, TEXTS), min_size=1, max_size=5),
    seed=st.integers(0, 999),
    drafted=st.booleans(),
)
def test_each_sequence_gets_what_it_asks_for_be_it_drafted_or_not(
    rows: list[tuple[SamplingParams, tuple[list[int], list[int]]]], seed: int, drafted: bool
) -> None:
    logits = random_logits(len(rows), seed)
    own, expected = logits.tolist(), []
    for values, (params, (prompt, answer)) in zip(own, rows, strict=True):
        expected.append(edited(values, Row.of(params, prompt, answer)))
    sequences = [decoding(params, prompt, answer) for params, (prompt, answer) in rows]
    if drafted:
        # While the step before runs, a placeholder stands for the last token.
        last = [sequence.token_ids.pop() for sequence in sequences]
        for sequence in sequences:
            sequence.token_ids.append(PLACEHOLDER)
        inputs = lay_out(step_of(sequences), block_size=1)
        for sequence, token in zip(sequences, last, strict=True):
            sequence.token_ids[-1] = token
        write_sampled_tokens(inputs, step_of(sequences))
    else:
        inputs = lay_out(step_of(sequences), block_size=1)
    sampled = run(inputs, logits)
    for row, (params, _) in enumerate(rows):
        assert logits[row].tolist() == pytest.approx(expected[row], rel=1e-6, abs=1e-6)
        token = max(range(VOCAB), key=lambda t: (logits[row, t].item(), -t))
        assert sampled.token_ids[row] == token
        if params.logprobs is None:
            assert row not in sampled.logprobs
            continue
        (told,) = sampled.logprobs[row]
        logprobs = log_softmax(own[row])
        likeliest = sorted(range(VOCAB), key=lambda t: (-own[row][t], t))[: params.logprobs]
        assert (told.token_id, told.top_token_ids) == (token, likeliest)
        assert told.rank == 1 + sum(value > own[row][token] for value in own[row])
        assert [told.logprob, *told.top_logprobs] == pytest.approx([logprobs[t] for t in (token, *likeliest)])


class Narrow:
    """Kernels that can do nothing but sample."""

    def __init__(self) -> None:
        self.num_calls = 0

    def sample(self, logits: torch.Tensor, batch: object) -> torch.Tensor:
        self.num_calls += 1
        return reference.sample(logits, batch)


def test_a_batch_in_which_nobody_asks_for_more_is_one_sampling_and_has_no_other_inputs() -> None:
    sequences = [decoding(replace(PLAIN, temperature=t), [1, 2, 3], [4]) for t in (0.0, 1.0)]
    inputs = lay_out(step_of(sequences), block_size=1)
    assert inputs.extras is None
    assert view_batch(inputs, torch.from_numpy(inputs.words)).sampling.typical_p is None
    kernels = Narrow()
    run(inputs, random_logits(2, 0), kernels)
    assert kernels.num_calls == 1


def test_who_asks_adds_nothing_to_the_inputs_of_a_step_but_words_of_its_own() -> None:
    plain = lay_out(step_of([decoding(PLAIN, [1, 2], [3]) for _ in range(3)]), 1, zeros)
    asking = [decoding(PLAIN, [1, 2], [3]) for _ in range(2)]
    asking.append(decoding(replace(PLAIN, repetition_penalty=2.0, logit_bias={5: 1.0}), [1, 2], [3]))
    inputs = lay_out(step_of(asking), 1, zeros)
    assert np.array_equal(inputs.words, plain.words)
    # A row and three factors; two entries and one for the last token; one bias.
    assert len(inputs.extras.words) == 4 + 3 * 3 + 3


@pytest.mark.parametrize(
    "changes",
    [
        {"min_tokens": 2, "stop_token_ids": frozenset({7})},
        {"bad_words": ((5, 6),)},
    ],
)
def test_what_is_over_or_does_not_apply_costs_no_operation(changes: dict[str, object]) -> None:
    sequence = decoding(replace(PLAIN, **changes), [1, 2], [3, 4])
    inputs = lay_out(step_of([sequence]), block_size=1)
    assert inputs.extras is None or inputs.extras.num_bans == 0
    if inputs.extras is not None:
        edits = inputs.extras.view(torch.from_numpy(inputs.extras.words)).edits
        assert (edits.penalties, edits.bias, edits.allowed, edits.banned) == (None, None, None, None)


def test_case_20_a_neighbour_with_a_bias_changes_no_bit() -> None:
    """Case 20: neighbours' output is bitwise unchanged by a row with bias."""
    found = []
    for bias in ({}, {3: -math.inf, 4: 50.0}):
        neighbours = [decoding(replace(PLAIN, temperature=t, seed=5, logprobs=3), [1], [2]) for t in (0.0, 1.3)]
        sequences = [neighbours[0], decoding(replace(PLAIN, logit_bias=bias), [1], [2]), neighbours[1]]
        logits = random_logits(3, 8)
        sampled = run(lay_out(step_of(sequences), block_size=1), logits)
        found.append((logits[[0, 2]].tolist(), sampled.token_ids[::2], sampled.logprobs))
    assert found[0] == found[1]


def test_case_29_logprobs_0_are_the_chosen_tokens_alone_and_minus_infinity_is_a_value() -> None:
    """Case 29: logprobs = 0 gives the chosen token's only; minus infinity is told as it is."""
    params = replace(PLAIN, temperature=1.0, logprobs=0)
    everything = replace(params, logprobs=VOCAB)
    logits = torch.full((2, VOCAB), -math.inf)
    logits[:, 4] = 1.0
    sampled = run(lay_out(step_of([decoding(params, [1], []), decoding(everything, [1], [])]), block_size=1), logits)
    assert sampled.logprobs[0] == [(4, 0.0, 1, [], [])]
    (told,) = sampled.logprobs[1]
    assert told.top_token_ids == [4, 0, 1, 2, 3, *range(5, VOCAB)]
    assert told.top_logprobs == [0.0] + [-math.inf] * (VOCAB - 1)


def test_beams_get_their_continuations_by_the_edited_logits_and_their_logprobs_by_the_models_own() -> None:
    params = replace(PLAIN, bad_words=((3,),), logprobs=1)
    beam = decoding(params, [1], [2], num_continuations=3)
    other = decoding(PLAIN, [1], [2], num_continuations=2)
    logits = random_logits(2, 1)
    logits[0, 3] = 50.0
    own = logits[0].tolist()
    sampled = run(lay_out(step_of([beam, other]), block_size=1), logits)
    after = log_softmax([-math.inf if t == 3 else value for t, value in enumerate(own)])
    best = sorted(range(VOCAB), key=lambda t: -after[t])[:3]
    assert [token for token, _ in sampled.continuations[0]] == best
    assert [value for _, value in sampled.continuations[0]] == pytest.approx([after[t] for t in best])
    assert [told.token_id for told in sampled.logprobs[0]] == best
    assert [told.logprob for told in sampled.logprobs[0]] == pytest.approx([log_softmax(own)[t] for t in best])
    assert [(told.rank, told.top_token_ids) for told in sampled.logprobs[0]] == [(rank, [3]) for rank in (2, 3, 4)]
    assert len(sampled.continuations[1]) == 2
    assert 1 not in sampled.logprobs


@settings(max_examples=100, deadline=None)
@given(
    prompt=st.lists(TOKENS, min_size=1, max_size=6),
    changes=st.lists(st.integers(-3, 30), max_size=12),
    lists_prompt=st.booleans(),
)
def test_counts_follow_the_tokens_however_they_change(
    prompt: list[int], changes: list[int], lists_prompt: bool
) -> None:
    counts, tokens = TokenCounts(len(prompt), lists_prompt), list(prompt)
    numbers = itertools.count()
    for change in changes:
        if change < 0:  # a search starts again, and may come to the same length before anybody counts
            del tokens[len(prompt) :]
        elif change == 0:  # a beam takes over where another one is
            tokens = [*prompt, *reversed(tokens[len(prompt) :])]
        else:
            tokens += [next(numbers) * 7 % 23 for _ in range(change)]
        counts.count(tokens, max(0, len(tokens) - 1))
        counted = tokens[:-1]
        expected = Counter(counted[len(prompt) :])
        if lists_prompt:
            expected.update(dict.fromkeys(counted[: len(prompt)], 0))
        assert dict(counts.entries.T.tolist()) == dict(expected)
        assert counts.entries.shape[1] == len(expected)
        assert all(counts.of(token) == expected[token] for token in range(23))


def test_padding_and_the_rest_of_a_word_of_several_tokens_do_not_matter() -> None:
    params = replace(PLAIN, bad_words=((1, 2, 3), (2, 4), (9, 9)))
    for answer, banned in (([1, 2], {3, 4}), ([2], {4}), ([5], set()), ([9], {9}), ([], set())):
        logits = torch.zeros(1, VOCAB)
        # The prompt ends like the words begin, but does not count.
        run(lay_out(step_of([decoding(params, [1, 2, 9], answer)]), block_size=1, padded_to=1), logits)
        assert set(logits[0].isinf().nonzero().flatten().tolist()) == banned
