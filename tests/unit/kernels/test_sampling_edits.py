"""What is done to logits before a token is chosen, against each rule said once more in plain Python."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.interface import LogitEdits, Penalties
from tests.plain_sampling import Row, edited

VOCAB = 11


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def reals(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def penalties_of(rows: list[Row]) -> Penalties | None:
    penalised = [(i, row) for i, row in enumerate(rows) if row.penalised]
    if not penalised:
        return None
    entries, last = [], []
    for owner, (_, row) in enumerate(penalised):
        text = row.prompt + row.answer
        # As far as the last token, which counts anew at the end: earlier entries may be out of date.
        entries += [(owner, token, row.answer[:-1].count(token)) for token in sorted(set(text[:-1]))]
        last.append((owner, text[-1], row.answer.count(text[-1])))
    owners, token_ids, counts = map(ints, map(list, zip(*entries, *last, strict=True)))
    return Penalties(
        rows=ints([i for i, _ in penalised]),
        repetition=reals([row.repetition for _, row in penalised]),
        presence=reals([row.presence for _, row in penalised]),
        frequency=reals([row.frequency for _, row in penalised]),
        owners=owners,
        token_ids=token_ids,
        counts=counts,
    )


def edits_of(rows: list[Row]) -> LogitEdits:
    biases = [(i, token, value) for i, row in enumerate(rows) for token, value in row.bias.items()]
    allowed = [(i, token) for i, row in enumerate(rows) for token in sorted(row.allowed)]
    banned = [(i, token) for i, row in enumerate(rows) for token in sorted(row.banned)]
    restricted = ints([i for i, row in enumerate(rows) if row.allowed])
    bias = tuple(make(list(v)) for make, v in zip((ints, ints, reals), zip(*biases, strict=True), strict=False))
    return LogitEdits(
        penalties=penalties_of(rows),
        bias=bias or None,
        allowed=(restricted, ints([i for i, _ in allowed]), ints([t for _, t in allowed])) if allowed else None,
        banned=(ints([i for i, _ in banned]), ints([t for _, t in banned])) if banned else None,
    )


TOKENS = st.integers(0, VOCAB - 1)
PLAIN = st.builds(Row)
ASKING = st.builds(
    Row,
    prompt=st.lists(TOKENS, min_size=1, max_size=6),
    answer=st.lists(TOKENS, max_size=8),
    repetition=st.sampled_from([1.0, 0.01, 0.5, 1.3, 100.0]),
    presence=st.sampled_from([0.0, -2.0, 0.7]),
    frequency=st.sampled_from([0.0, 1.5, -0.3]),
    bias=st.dictionaries(TOKENS, st.sampled_from([-100.0, 3.25, 100.0, -math.inf]), max_size=4),
    allowed=st.sets(TOKENS, max_size=4),
    banned=st.sets(TOKENS, max_size=4),
)


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(PLAIN | ASKING, min_size=1, max_size=5), seed=st.integers(0, 1000))
def test_each_row_follows_its_own_rules_and_a_plain_one_keeps_every_bit(rows: list[Row], seed: int) -> None:
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
    logits[:, seed % VOCAB] = -math.inf
    expected = [edited(values, row) for values, row in zip(logits.tolist(), rows, strict=True)]
    reference.edit_logits(logits, edits_of(rows))
    for ours, theirs in zip(logits.tolist(), expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-6)
    for i, row in enumerate(rows):
        if row == Row():
            assert logits[i].tolist() == expected[i]


def test_rows_may_be_a_part_of_a_larger_tensor() -> None:
    padded = torch.full((3, 16), math.nan)
    padded[:2, :VOCAB] = 1.0
    reference.edit_logits(padded[:2, :VOCAB], edits_of([Row(allowed={1}), Row(bias={2: 1.0}, banned={0})]))
    assert padded[0, :3].tolist() == [-math.inf, 1.0, -math.inf]
    assert padded[1, :3].tolist() == [-math.inf, 1.0, 2.0]
    assert padded[2].isnan().all()
    assert padded[:, VOCAB:].isnan().all()


def test_no_edit_is_no_operation() -> None:
    reference.edit_logits(None, LogitEdits())  # nobody looks at it


def test_nothing_lifts_a_ban() -> None:
    logits = torch.zeros(1, VOCAB)
    reference.edit_logits(logits, edits_of([Row(bias={3: 100.0}, allowed={3, 4}, banned={3})]))
    assert logits.isfinite().nonzero().tolist() == [[0, 4]]
