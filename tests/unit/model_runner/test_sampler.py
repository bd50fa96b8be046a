"""The sampler is a pure function of (seed, candidate, position, logits)."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.reference.sampling import keep_top, keep_typical
from model_runner.sampler import SampleRequest, sampling_batch
from model_runner.sampling_params import SamplingParams

DEFAULTS = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, seed=7, stop_token_ids=frozenset())


def request(position: int = 0, candidate: int = 0, **changes: float) -> SampleRequest:
    return SampleRequest(dataclasses.replace(DEFAULTS, **changes), candidate, position)


def sample(logits: torch.Tensor, requests: list[SampleRequest]) -> list[int]:
    return reference.sample(logits, sampling_batch(requests)).tolist()


def random_logits(rows: int, vocab: int = 97, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def test_zero_temperature_is_the_likeliest_token() -> None:
    logits = random_logits(5)
    assert sample(logits, [request(p, temperature=0.0) for p in range(5)]) == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": 1},
        {"top_p": 1e-9},
        {"top_p": 5e-324, "top_k": 5},
        {"top_p": 1e-9, "typical_p": 0.5},
        {"top_k": 1, "typical_p": 1e-9},
        {"min_p": 1.0},
        {"temperature": 1e-6},
        {"temperature": 5e-324},
    ],
)
def test_case_21_the_narrowest_filters_leave_the_likeliest_token(changes: dict[str, float]) -> None:
    """Case 21: tiny top_p = argmax; top_k 1 = argmax."""
    logits = random_logits(20)
    assert sample(logits, [request(p, **changes) for p in range(20)]) == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    "changes",
    [{"top_k": 0}, {"top_k": 97}, {"top_k": 5000}, {"top_p": 1.0}, {"min_p": 0.0}, {"typical_p": 1.0}],
)
def test_case_21_a_filter_that_is_off_changes_nothing(changes: dict[str, float]) -> None:
    """Case 21: top_k 0 = off, > V = off."""
    logits = random_logits(20)
    assert sample(logits, [request(p, **changes) for p in range(20)]) == sample(logits, [request(p) for p in range(20)])


def test_samples_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.1])
    rows = probabilities.log().repeat(4000, 1)
    counts = torch.bincount(torch.tensor(sample(rows, [request(p) for p in range(4000)])), minlength=4)
    assert torch.allclose(counts / 4000, probabilities, atol=0.03)


def test_top_p_keeps_the_smallest_set_that_reaches_it_and_top_k_comes_first() -> None:
    rows = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().repeat(500, 1)
    assert set(sample(rows, [request(p, top_p=0.7) for p in range(500)])) == {0, 1}
    assert set(sample(rows, [request(p, top_p=0.71) for p in range(500)])) == {0, 1, 2}
    # Of the two that top_k leaves, the first has 0.4 / 0.7 = 0.571 of the weight.
    assert set(sample(rows, [request(p, top_k=2, top_p=0.57) for p in range(500)])) == {0}


def test_min_p_drops_what_is_much_less_likely_than_the_likeliest() -> None:
    rows = torch.tensor([0.5, 0.26, 0.14, 0.1]).log().repeat(500, 1)
    assert set(sample(rows, [request(p, min_p=0.5) for p in range(500)])) == {0, 1}


def typical(weights: list[float], share: float) -> set[int]:
    """Worked out from the definition: tokens in the order of how near their surprise is to the expected one."""
    total = math.fsum(weights)
    probabilities = {token: weight / total for token, weight in enumerate(weights) if weight}
    expected = math.fsum(-p * math.log(p) for p in probabilities.values())
    order = sorted(probabilities, key=lambda token: (abs(-math.log(probabilities[token]) - expected), token))
    kept, mass = set(), 0.0
    for token in order:
        if kept and mass >= share:
            break
        kept.add(token)
        mass += probabilities[token]
    return kept


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10_000), share=st.floats(0.01, 0.99), filters=st.booleans())
def test_typical_p_keeps_the_least_surprising_of_what_the_others_leave(seed: int, share: float, filters: bool) -> None:
    logits = random_logits(1, vocab=9, seed=seed)
    weights = torch.softmax(logits[0].double(), 0)
    top = keep_top(weights[None], torch.tensor([6]), torch.tensor([0.95]), torch.tensor([0.02])) if filters else None
    left = weights if top is None else top[0]
    kept = keep_typical(left[None], torch.tensor([share], dtype=torch.float64))[0]
    assert set(kept.nonzero().flatten().tolist()) == typical(left.tolist(), share)
    changes = {"top_k": 6, "top_p": 0.95, "min_p": 0.02} if filters else {}
    drawn = sample(logits.repeat(60, 1), [request(p, typical_p=share, **changes) for p in range(60)])
    assert set(drawn) <= typical(left.tolist(), share)


def test_typical_p_may_drop_the_likeliest_token() -> None:
    # The surprise of the first is half of the expected one; the others are all alike, and near to it.
    rows = torch.tensor([0.3] + [0.07] * 10).log().repeat(200, 1)
    assert 0 not in sample(rows, [request(p, typical_p=0.5) for p in range(200)])


def test_a_token_of_no_weight_is_never_drawn() -> None:
    rows = torch.full((300, 8), -math.inf)
    rows[:, 3] = 0.0
    assert set(sample(rows, [request(p) for p in range(300)])) == {3}


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_row_is_sampled_alike_alone_and_among_any_neighbours(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 6))
    logits = random_logits(rows, seed=data.draw(st.integers(0, 50)))
    choices = st.builds(
        request,
        position=st.integers(0, 9),
        candidate=st.integers(0, 3),
        temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        top_k=st.sampled_from([0, 1, 5]),
        top_p=st.sampled_from([0.1, 0.9, 1.0]),
        min_p=st.sampled_from([0.0, 0.2]),
        typical_p=st.sampled_from([1.0, 0.5]),
        seed=st.integers(0, 2**64 - 1),
    )
    requests = [data.draw(choices) for _ in range(rows)]
    together = sample(logits, requests)
    assert together == [sample(logits[i : i + 1], [requests[i]])[0] for i in range(rows)]


def test_seed_candidate_and_position_each_change_the_draw() -> None:
    logits = torch.zeros(4, 5000)
    places = [request(), request(seed=8), request(candidate=1), request(position=1)]
    assert len(set(sample(logits, places))) == 4
