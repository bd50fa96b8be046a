"""Sampling on the device against the specification: the same sets, the same draws."""

import dataclasses
import math

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.interface import SamplingBatch
from kernels.reference import noise
from kernels.triton.noise import draw_key, exponential, token_bits
from kernels.triton.sampling import sample
from kernels.triton.sampling_filters import lowest_kept
from kernels.triton.token_order import token_key


@triton.jit
def _philox(words, key, counter):  # noqa: ANN001, ANN202 - triton reads annotations
    word = tl.philox(
        tl.load(key),
        tl.load(counter).to(tl.int32),
        tl.load(counter + 1).to(tl.int32),
        tl.load(counter + 2).to(tl.int32),
        tl.load(counter + 3).to(tl.int32),
    )
    for i in tl.static_range(4):
        tl.store(words + i, word[i].to(tl.int64))


@triton.jit
def _noise(keys, bits, numbers, draw, SIZE: tl.constexpr):  # noqa: ANN001, ANN202 - the same
    token = tl.arange(0, SIZE)
    key = draw_key(tl.load(draw), tl.load(draw + 1), tl.load(draw + 2))
    found = token_bits(key, token)
    tl.store(keys, key.to(tl.int64, bitcast=True))
    tl.store(bits + token, found)
    tl.store(numbers + token, exponential(found))


@triton.jit
def _exponential(numbers, bits, SIZE: tl.constexpr):  # noqa: ANN001, ANN202 - the same
    index = tl.arange(0, SIZE)
    tl.store(numbers + index, exponential(tl.load(bits + index)))


@triton.jit
def _kept(kept, logits, vocab, choice, top_k, SIZE: tl.constexpr):  # noqa: ANN001, ANN202 - the same
    index = tl.arange(0, SIZE)
    keys = token_key(tl.load(logits + index, mask=index < vocab, other=float("-inf")), index)
    temperature, top_p, min_p = tl.load(choice), tl.load(choice + 1), tl.load(choice + 2)
    lowest = lowest_kept(logits, vocab, tl.max(keys, 0), temperature, tl.load(top_k), top_p, min_p)
    tl.store(kept + index, keys >= lowest, mask=index < vocab)


def batch(rows: int, **changes: float) -> SamplingBatch:
    """Rows that differ in seed, candidate and position only."""
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | changes

    def column(name: str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.full((rows,), values[name], dtype=dtype)

    numbers = torch.arange(rows)
    return SamplingBatch(
        temperature=column("temperature"),
        top_k=column("top_k", torch.int64),
        top_p=column("top_p"),
        min_p=column("min_p"),
        seed=numbers * 0x1234567890ABCDE - 3,
        candidate=numbers % 3,
        position=numbers * 7,
        all_greedy=values["temperature"] == 0,
        filters=values["top_k"] > 0 or values["top_p"] < 1 or values["min_p"] > 0,
    )


def random_logits(rows: int, vocab: int, kind: str = "normal") -> torch.Tensor:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    if kind == "bfloat16":
        return logits.bfloat16().float()
    if kind == "integers":
        return logits.round()
    if kind == "few":
        return logits.masked_fill(torch.arange(vocab) % 50 != 3, -math.inf)
    return logits


def kept_by_kernel(logits: torch.Tensor, choice: SamplingBatch) -> torch.Tensor:
    kept = torch.zeros(len(logits), dtype=torch.bool)
    reals = torch.cat((choice.temperature, choice.top_p, choice.min_p))
    size = triton.next_power_of_2(len(logits))
    _kept[1,](kept, logits, len(logits), reals, choice.top_k, SIZE=size)
    return kept


def kept_by_reference(logits: torch.Tensor, choice: SamplingBatch) -> torch.Tensor:
    """Worked out from the definition: one token after the other, likeliest first."""
    logits = logits.double()
    weights = ((logits - logits.max()) / choice.temperature[0]).exp()
    order = sorted(range(len(logits)), key=lambda token: (-logits[token].item(), token))
    top_k, top_p, min_p = choice.top_k[0].item(), choice.top_p[0].item(), choice.min_p[0].item()
    order = order[: top_k or len(order)]
    total = weights[order].sum().item()
    kept = torch.zeros(len(logits), dtype=torch.bool)
    before = 0.0
    for token in order:
        if kept.any() and before >= top_p * total:
            break
        kept[token] = True
        before += weights[token].item()
    return kept & (weights >= min_p) & (weights > 0)


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        # Known answers published with the Random123 library.
        (0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (-1, (-1, -1, -1, -1), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            0x299F31D0A4093822,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(key: int, counter: tuple[int, ...], expected: tuple[int, ...]) -> None:
    words = torch.zeros(4, dtype=torch.int64)
    _philox[1,](words, torch.tensor([key]), torch.tensor(counter))
    assert tuple(words.tolist()) == expected


@pytest.mark.parametrize("vocab", [1, 2, 97, 4096, 4097, 20000])
@pytest.mark.parametrize("kind", ["normal", "integers", "few"])
def test_greedy_takes_the_likeliest_and_the_first_of_equals(vocab: int, kind: str) -> None:
    logits = random_logits(3, vocab, kind)
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert sample(logits, batch(3, temperature=0)).tolist() == expected


def test_greedy_takes_zero_and_negative_zero_for_equal() -> None:
    assert sample(torch.tensor([[-1.0, -0.0, 0.0]]), batch(1, temperature=0)).tolist() == [1]


FILTERS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 1e-9},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.02},
    {"top_k": 30, "top_p": 0.95, "temperature": 0.5},
    {"top_k": 40, "top_p": 0.5, "temperature": 50.0},
    {"top_p": 0.5, "temperature": 1e-3},
]


@pytest.mark.parametrize("changes", FILTERS, ids=str)
@pytest.mark.parametrize("kind", ["normal", "bfloat16", "integers", "few"])
def test_filters_keep_exactly_the_tokens_of_the_definition(kind: str, changes: dict[str, float]) -> None:
    for logits in random_logits(1, 500, kind):
        choice = batch(1, **changes)
        kept = kept_by_kernel(logits, choice)
        weighty = logits > logits.max() - 104 * choice.temperature[0]  # whatever weighs nothing may count as kept
        assert torch.equal(kept & weighty, kept_by_reference(logits, choice) & weighty)


def test_of_equal_logits_the_first_are_kept() -> None:
    logits = torch.zeros(700)
    assert kept_by_kernel(logits, batch(1, top_k=123)).nonzero().flatten().tolist() == list(range(123))
    assert kept_by_kernel(logits, batch(1, top_p=0.3005)).nonzero().flatten().tolist() == list(range(211))


def row_of(choice: SamplingBatch, row: int) -> SamplingBatch:
    tensors = {name: value for name, value in vars(choice).items() if isinstance(value, torch.Tensor)}
    return dataclasses.replace(choice, **{name: value[row : row + 1] for name, value in tensors.items()})


@pytest.mark.parametrize(
    ("seed", "candidate", "position"),
    [(0, 0, 0), (7, 0, 3), (-1, 2**32 - 1, 2**32 - 1), (-(1 << 63), 1, 1 << 31), (0x1234567890ABCDE, 1 << 31, 5)],
)
def test_noise_has_the_same_bits_as_the_references(seed: int, candidate: int, position: int) -> None:
    size = 4096
    keys, numbers = torch.zeros(1, dtype=torch.int64), torch.zeros(size)
    bits = torch.zeros(size, dtype=torch.int32)
    _noise[1,](keys, bits, numbers, torch.tensor([seed, candidate, position]), SIZE=size)
    assert keys.tolist() == [noise.draw_key(seed, candidate, position)]
    expected = noise.token_bits(keys, size)[0]
    assert torch.equal(bits, expected)
    torch.testing.assert_close(numbers.double(), noise.exponentials(expected), rtol=2**-21, atol=0)


def test_noise_is_as_exact_for_any_bits() -> None:
    edges = [0, *[1 << power for power in range(31)]]
    edges += [(1 << 31) - 1 - edge for edge in edges]
    bits = torch.tensor(edges + [~edge for edge in edges], dtype=torch.int32)
    numbers = torch.zeros(len(bits))
    _exponential[1,](numbers, bits, SIZE=len(bits))
    torch.testing.assert_close(numbers.double(), noise.exponentials(bits), rtol=2**-21, atol=0)


@pytest.mark.parametrize(("vocab", "rows"), [(300, 3), (9000, 1)])
@pytest.mark.parametrize("changes", [{}, {"temperature": 0.3}, *FILTERS[-5:]], ids=str)
def test_draws_are_the_references(vocab: int, rows: int, changes: dict[str, float]) -> None:
    logits, choice = random_logits(rows, vocab, "bfloat16"), batch(rows, **changes)
    assert torch.equal(sample(logits, choice), reference.sample(logits, choice))


def test_many_seeds_draw_what_the_reference_draws_and_follow_the_distribution() -> None:
    shares = torch.tensor([0.5, 0.25, 0.15, 0.1])
    logits, choice = shares.log().repeat(100, 1), batch(100)
    tokens = sample(logits, choice)
    assert torch.equal(tokens, reference.sample(logits, choice))
    assert torch.allclose(torch.bincount(tokens, minlength=4) / len(tokens), shares, atol=0.12)


@pytest.mark.parametrize("temperature", [5e-324, 1e-38, 1e-6, 1e6, 1e300])
@pytest.mark.parametrize("changes", [{}, {"top_k": 5, "top_p": 0.9}], ids=str)
def test_no_temperature_is_too_small_or_too_large(temperature: float, changes: dict[str, float]) -> None:
    logits, choice = random_logits(2, 100, "few"), batch(2, temperature=temperature, **changes)
    assert torch.equal(sample(logits, choice), reference.sample(logits, choice))


def test_greedy_rows_among_others_are_greedy() -> None:
    logits, choice = random_logits(6, 200), batch(6, top_k=5)
    choice.temperature[::2] = 0
    ours = sample(logits, choice)
    assert torch.equal(ours, reference.sample(logits, choice))
    assert torch.equal(ours[::2], logits[::2].argmax(-1))


def test_rows_may_be_a_part_of_a_larger_tensor() -> None:
    padded = torch.full((5, 128), float("nan"))
    padded[:, :100] = random_logits(5, 100)
    choice = batch(5, top_k=9)
    assert torch.equal(sample(padded[:, :100], choice), reference.sample(padded[:, :100], choice))


def test_no_rows_are_no_work() -> None:
    assert sample(torch.empty(0, 10), batch(0)).shape == (0,)


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_a_row_is_sampled_alike_alone_and_among_any_neighbours(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 3))
    logits = torch.randn(rows, 97, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 50)))) * 3

    def column(values: list[float], dtype: torch.dtype = torch.float64) -> torch.Tensor:
        choices = st.lists(st.sampled_from(values), min_size=rows, max_size=rows)
        return torch.tensor(data.draw(choices), dtype=dtype)

    choice = dataclasses.replace(
        batch(rows),
        temperature=column([0.0, 0.3, 1.0, 2.0]),
        top_k=column([0, 1, 5], torch.int64),
        top_p=column([0.1, 0.9, 1.0]),
        min_p=column([0.0, 0.2]),
        filters=True,
    )
    together = sample(logits, choice).tolist()
    for row in range(rows):
        assert sample(logits[row : row + 1], row_of(choice, row)).item() == together[row]


@pytest.mark.parametrize("kind", ["normal", "integers"])
def test_typical_rows_keep_what_the_reference_keeps_and_leave_their_neighbours_alone(kind: str) -> None:
    logits, plain = random_logits(6, 300, kind), batch(6, top_k=40, top_p=0.9, min_p=0.01)
    plain.temperature[4:] = 0
    typical = dataclasses.replace(plain, typical_p=torch.tensor([0.2, 1.0, 0.9, 1.0, 0.5, 1e-9], dtype=torch.float64))
    ours, before = sample(logits, typical), logits.clone()
    assert torch.equal(ours, reference.sample(logits, typical))
    assert torch.equal(ours[[1, 3]], sample(logits, plain)[[1, 3]])
    assert torch.equal(ours[4:], logits[4:].argmax(-1))
    assert torch.equal(logits, before)
