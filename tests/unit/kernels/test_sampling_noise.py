"""The numbers that draws are made of: published ones, evenly spread, and strangers to their neighbours.

Seeds are fixed, so nothing here is left to chance: a bound is what good numbers exceed once in a million times or so.
"""

import math

import pytest
import torch

from kernels.reference.noise import draw_key, exponentials, philox4x32, token_bits
from tests.plain_sampling import DOUBLE_WORD, WORD, signed, split_mix

VOCAB = 50_000
DEVIATIONS = 5.0
"""How far, in standard deviations, a figure may lie from the expected one."""


def bits_of(seed: int = 1, candidate: int = 0, position: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return token_bits(torch.tensor([draw_key(seed, candidate, position)]), vocab)[0]


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        # Known answers published with the Random123 library.
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(key: tuple, counter: tuple, expected: tuple) -> None:
    assert philox4x32(key, counter) == expected


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        # Known answers of SplitMix64, in wide use as the seeding of other generators.
        (0, [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]),
        (1234567, [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]),
    ],
)
def test_tokens_have_the_halves_of_the_published_numbers_of_splitmix64(key: int, expected: list[int]) -> None:
    halves = [bits & WORD for bits in token_bits(torch.tensor([key]), 8)[0].tolist()]
    assert [high << 32 | low for low, high in zip(halves[::2], halves[1::2], strict=True)] == expected
    assert split_mix(key, 4) == expected


@pytest.mark.parametrize("vocab", [1, 2, 1003])
def test_products_wrap_around_alike_wherever_a_token_stands(vocab: int) -> None:
    keys = torch.tensor([draw_key(3, 0, position) for position in range(3)])
    for key, bits in zip(keys.tolist(), token_bits(keys, vocab).tolist(), strict=True):
        numbers = split_mix(key & DOUBLE_WORD, 1 + vocab // 2)
        assert bits == [signed(half) for number in numbers for half in (number & WORD, number >> 32)][:vocab]


def test_seed_candidate_and_position_each_change_the_key() -> None:
    places = [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1), (1 << 40, 0, 0), (0, 0, 0), (0, 1, 0), (0, 0, 1)]
    assert len({draw_key(*place) for place in places}) == len(places)
    assert draw_key(-1, 5, 7) == draw_key(DOUBLE_WORD, 5, 7)


def test_a_number_is_above_0_whatever_the_bits_and_small_ones_are_exact() -> None:
    bits = [-(1 << 31), -(1 << 31) + 1, -1, 0, (1 << 31) - 2, (1 << 31) - 1]
    # With log1p, where the specification has a logarithm of what is close to 1.
    expected = [-math.log1p(-0.5 - (2 * number + 1) / 2**33) for number in bits]
    assert exponentials(torch.tensor(bits, dtype=torch.int32)).tolist() == pytest.approx(expected, rel=1e-15)
    assert (min(expected), max(expected)) == (pytest.approx(2.0**-33), pytest.approx(33 * math.log(2)))


def test_numbers_are_exponentially_distributed_also_where_they_are_small() -> None:
    numbers = torch.cat([exponentials(bits_of(position=position)) for position in range(20)])
    count = len(numbers)
    assert abs(numbers.mean() - 1) < DEVIATIONS / count**0.5
    assert abs(numbers.var() - 1) < DEVIATIONS * (8 / count) ** 0.5
    for below in (4.0, 2.0, 1.0, 0.5, 0.1, 1e-2, 1e-3, 1e-4):
        expected = -math.expm1(-below) * count
        assert abs((numbers < below).sum() - expected) < DEVIATIONS * expected**0.5, below


NEIGHBOURS = {
    "the next token": lambda place: bits_of(*place, vocab=VOCAB + 1)[1:],
    "the token after that": lambda place: bits_of(*place, vocab=VOCAB + 2)[2:],
    "a token 64 further on": lambda place: bits_of(*place, vocab=VOCAB + 64)[64:],
    "the next position": lambda place: bits_of(place[0], place[1], place[2] + 1),
    "the next candidate": lambda place: bits_of(place[0], place[1] + 1, place[2]),
    "candidate and position exchanged": lambda place: bits_of(place[0], place[2], place[1]),
    "the next seed": lambda place: bits_of(place[0] + 1, place[1], place[2]),
    "a seed whose upper half differs": lambda place: bits_of(place[0] + (1 << 32), place[1], place[2]),
}


@pytest.mark.parametrize("neighbour", NEIGHBOURS)
@pytest.mark.parametrize("place", [(1, 0, 1), (42, 3, 1000)], ids=str)
def test_neighbours_are_independent(neighbour: str, place: tuple[int, int, int]) -> None:
    ours, theirs = bits_of(*place), NEIGHBOURS[neighbour](place)
    pairs = torch.stack((exponentials(ours), exponentials(theirs)))
    assert abs(pairs.corrcoef()[0, 1]) < DEVIATIONS / VOCAB**0.5
    for bit in range(32):
        differing = int(((ours ^ theirs) >> bit & 1).sum())
        assert abs(differing - VOCAB / 2) < DEVIATIONS * VOCAB**0.5 / 2, bit


def test_every_bit_is_set_in_half_of_the_tokens() -> None:
    bits = bits_of(position=9)
    for bit in range(32):
        assert abs(int((bits >> bit & 1).sum()) - VOCAB / 2) < DEVIATIONS * VOCAB**0.5 / 2, bit
