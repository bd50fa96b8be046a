"""Draws follow the distribution, know nothing of each other, and outlast rounding. Seeds are fixed: no chance."""

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import cpu, reference
from kernels.interface import SamplingBatch
from kernels.reference.sampling import keep_top, keep_typical, weights_at
from tests.plain_sampling import drawn

Sample = Callable[[torch.Tensor, SamplingBatch], torch.Tensor]
PROBABILITIES = torch.tensor([0.35, 0.02, 0.2, 0.13, 0.01, 0.19, 0.06, 0.04], dtype=torch.float64)
DRAWS = 20_000
DEVIATIONS = 4.0
"""How far, in standard deviations, a figure may lie from the expected one."""


def batch(rows: int, *, seed: int = 5, candidates: int = 40, **changes: float) -> SamplingBatch:
    """Candidates of one request, position by position; `changes` are those of every row."""

    def column(name: str, default: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.full((rows,), changes.get(name, default), dtype=dtype)

    numbers = torch.arange(rows)
    return SamplingBatch(
        temperature=column("temperature", 1.0),
        top_k=column("top_k", 0, torch.int64),
        top_p=column("top_p", 1.0),
        min_p=column("min_p", 0.0),
        seed=torch.full((rows,), seed),
        candidate=numbers % candidates,
        position=numbers // candidates,
        all_greedy=False,
        filters=not {"top_k", "top_p", "min_p"}.isdisjoint(changes),
        typical_p=column("typical_p", 1.0) if "typical_p" in changes else None,
    )


def draws(choice: SamplingBatch, probabilities: torch.Tensor = PROBABILITIES) -> torch.Tensor:
    return reference.sample(probabilities.log().float().expand(len(choice.seed), -1), choice)


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """In standard deviations of what chance makes of it."""
    freedom = len(expected) - 1
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    return (statistic - freedom) / math.sqrt(2 * freedom)


FILTERS = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 3},
    {"top_p": 0.8},
    {"min_p": 0.15},
    {"typical_p": 0.7},
    {"temperature": 1.5, "top_k": 6, "top_p": 0.95, "min_p": 0.05, "typical_p": 0.9},
]


@pytest.mark.parametrize("changes", FILTERS, ids=str)
def test_draws_follow_what_temperature_and_filters_leave_of_the_distribution(changes: dict[str, float]) -> None:
    choice = batch(DRAWS, **changes)
    weights = weights_at(PROBABILITIES.log()[None], choice.temperature[:1])
    weights = keep_top(weights, choice.top_k[:1], choice.top_p[:1], choice.min_p[:1])
    if choice.typical_p is not None:
        weights = keep_typical(weights, choice.typical_p[:1])
    shares = weights[0] / weights.sum()
    counts = torch.bincount(draws(choice), minlength=len(shares))
    assert not counts[shares == 0].any()
    assert abs(chi_square(counts[shares > 0], DRAWS * shares[shares > 0])) < DEVIATIONS


def test_every_seed_follows_the_distribution() -> None:
    for seed in (0, 1, 2, -1, 1 << 32, (1 << 63) - 1):
        counts = torch.bincount(draws(batch(4000, seed=seed)), minlength=len(PROBABILITIES))
        assert abs(chi_square(counts, 4000 * PROBABILITIES)) < DEVIATIONS, seed


def test_thousands_of_unlikely_tokens_have_their_share_wherever_they_stand() -> None:
    # Each has 2.5e-5, all together as much as the likely one in their middle.
    tokens = torch.full((20_001,), 2.5e-5, dtype=torch.float64)
    tokens[10_000] = 0.5
    chosen = draws(batch(1200), tokens)
    counts = torch.histc(chosen.double(), 4, 0, 20_000)
    likely = (chosen == 10_000).sum()
    counts[2] -= likely
    shares = torch.tensor([0.125, 0.125, 0.125, 0.125, 0.5])
    assert abs(chi_square(torch.cat((counts, likely[None])), 1200 * shares)) < DEVIATIONS
    assert len(chosen[chosen != 10_000].unique()) > 560


@pytest.mark.parametrize("apart", [1, 40], ids=["candidates", "positions"])
def test_neighbouring_draws_are_independent(apart: int) -> None:
    # Of 40 candidates; the last is no neighbour of the next position's first, which does not matter here.
    chosen = draws(batch(DRAWS))
    first, second = chosen[:-apart], chosen[apart:]
    counts = torch.bincount(first * len(PROBABILITIES) + second, minlength=len(PROBABILITIES) ** 2)
    shares = torch.outer(PROBABILITIES, PROBABILITIES).flatten()
    assert abs(chi_square(counts, len(first) * shares)) < DEVIATIONS


def test_the_same_distribution_at_another_place_is_another_draw() -> None:
    first, second = draws(batch(DRAWS, seed=1)), draws(batch(DRAWS, seed=2))
    alike = (first == second).double().mean().item()
    expected = (PROBABILITIES**2).sum().item()
    assert abs(alike - expected) < DEVIATIONS * math.sqrt(expected * (1 - expected) / DRAWS)


def expected_flips(logits: torch.Tensor, noise: float) -> float:
    """How many draws another token wins once each logit is off by independent normal noise of this deviation.

    The winner's time is exponential. Then the second arrives at the rate of all the others, so the logarithms of the
    two times lie closer than x with probability x (1 - sum of p²); the noise between them is normal, too.
    """
    others = 1 - (logits.double().softmax(-1) ** 2).sum(-1)
    return others.sum().item() * noise / math.sqrt(math.pi)


@pytest.mark.parametrize(("noise", "count"), [(2e-5, 100_000), (2e-2, 20_000)])
def test_rounding_of_the_logits_changes_no_more_draws_than_expected(noise: float, count: int) -> None:
    generator = torch.Generator().manual_seed(1)
    choice = batch(count)
    logits = torch.randn(count, 100, generator=generator) * 2
    disturbed = logits + noise * torch.randn(count, 100, generator=generator)
    flips = int((reference.sample(logits, choice) != reference.sample(disturbed, choice)).sum())
    expected = expected_flips(logits, noise)
    assert expected < 2 or noise > 1e-4
    assert abs(flips - expected) < DEVIATIONS * math.sqrt(expected)


@pytest.mark.parametrize("changes", FILTERS[3:-1], ids=str)
def test_a_filter_changes_no_draw_whose_token_it_keeps(changes: dict[str, float]) -> None:
    logits = torch.randn(300, 500, generator=torch.Generator().manual_seed(2)) * 2
    free, filtered = (reference.sample(logits, batch(300, **asked)) for asked in ({}, changes))
    same = free == filtered
    weights = logits.double().softmax(-1)
    choice = batch(300, **changes)
    kept = keep_top(weights, choice.top_k, choice.top_p, choice.min_p)
    if choice.typical_p is not None:
        kept = keep_typical(kept, choice.typical_p)
    was_kept = kept.gather(-1, free[:, None])[:, 0] > 0
    assert torch.equal(same, was_kept)
    assert 0 < was_kept.sum() < 300


@pytest.mark.parametrize("sample", [reference.sample, cpu.sample], ids=["reference", "cpu"])
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    candidate=st.integers(0, 2**32 - 1),
    position=st.integers(0, 2**32 - 1),
    shape=st.integers(0, 1000),
    vocab=st.integers(1, 300),
)
def test_a_draw_is_that_of_the_rules(
    sample: Sample, seed: int, candidate: int, position: int, shape: int, vocab: int
) -> None:
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(shape)) * 3
    choice = dataclasses.replace(
        batch(1),
        seed=torch.tensor([seed - (1 << 64) if seed >> 63 else seed]),
        candidate=torch.tensor([candidate]),
        position=torch.tensor([position]),
    )
    weights = [math.exp(logit - logits.max().item()) for logit in logits[0].tolist()]
    assert sample(logits, choice).tolist() == [drawn(weights, seed, candidate, position)]


def test_a_row_is_drawn_alike_alone_and_among_31_others() -> None:
    logits = torch.randn(32, 5000, generator=torch.Generator().manual_seed(4)) * 3
    mixed = batch(32, candidates=1, top_k=0, typical_p=1.0)
    for row, (name, value) in enumerate(
        [("temperature", 0.0), ("temperature", 1.5), ("top_k", 9), ("top_p", 0.9), ("min_p", 0.1), ("typical_p", 0.5)]
    ):
        getattr(mixed, name)[row::7] = value
    together = reference.sample(logits, mixed)
    for row in range(32):
        tensors = {name: value for name, value in vars(mixed).items() if isinstance(value, torch.Tensor)}
        alone = dataclasses.replace(mixed, **{name: value[row : row + 1] for name, value in tensors.items()})
        assert reference.sample(logits[row : row + 1], alone).item() == together[row].item()
