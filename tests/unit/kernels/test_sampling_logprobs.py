"""How likely tokens are, against the definition in plain Python."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.reference import logits as module
from tests.plain_sampling import log_softmax

LOGITS = st.sampled_from([-math.inf, -8.0, -0.0, 0.0, 0.125, 3.0, 3.0000002384185791, 40.0])


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_logprobs_ranks_and_the_likeliest_are_those_of_the_definition(data: st.DataObject) -> None:
    vocab, rows = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4))
    row = st.lists(LOGITS, min_size=vocab, max_size=vocab).filter(lambda logits: max(logits) > -math.inf)
    logits = [data.draw(row) for _ in range(rows)]
    count = data.draw(st.integers(1, 3))
    token_ids = [[data.draw(st.integers(0, vocab - 1)) for _ in range(count)] for _ in range(rows)]
    num_top = data.draw(st.integers(0, vocab + 2))
    found = reference.logprobs(torch.tensor(logits), torch.tensor(token_ids), num_top)
    for i, (values, tokens) in enumerate(zip(logits, token_ids, strict=True)):
        expected = log_softmax(values)
        assert found.chosen[i].tolist() == pytest.approx([expected[token] for token in tokens])
        assert found.ranks[i].tolist() == [1 + sum(value > values[token] for value in values) for token in tokens]
        likeliest = sorted(range(vocab), key=lambda t: (-values[t], t))[:num_top]
        assert found.top_token_ids[i].tolist() == likeliest
        assert found.top[i].tolist() == pytest.approx([expected[t] for t in likeliest])


def test_rows_are_worked_out_slice_by_slice_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(1))
    token_ids = torch.arange(14).reshape(7, 2)
    whole = reference.logprobs(logits, token_ids, 3)
    monkeypatch.setattr(module, "_SLICE", 100)
    parts = reference.logprobs(logits, token_ids, 3)
    assert all(torch.equal(getattr(parts, name), value) for name, value in vars(whole).items())


def test_no_rows_have_no_logprobs() -> None:
    found = reference.logprobs(torch.empty(0, 5), torch.empty(0, 1, dtype=torch.int64), 2)
    assert (found.chosen.shape, found.top.shape) == ((0, 1), (0, 2))
