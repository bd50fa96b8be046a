"""The randomness of draws: numbers that depend on seed, candidate, position and token alone."""

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_FACTORS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


def philox4x32(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10: four 32-bit words that depend on nothing but `key` and `counter` (32-bit words, too)."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(_ROUNDS):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (product1 >> 32) ^ c1 ^ k0, product1 & _MASK, (product0 >> 32) ^ c3 ^ k1, product0 & _MASK
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def draw_key(seed: int, candidate: int, position: int) -> int:
    """The key of a draw: 64 bits as a signed integer."""
    high, low, _, _ = philox4x32((seed & _MASK, seed >> 32 & _MASK), (position & _MASK, candidate & _MASK, 0, 0))
    return (high - (high >> 31 << 32)) << 32 | low


def token_bits(keys: torch.Tensor, vocab: int) -> torch.Tensor:
    """32 bits for each token of each draw: the halves, lower first, of what SplitMix64 gives if it begins with the key.

    Args:
        keys: [draws] int64.
        vocab: tokens.

    Returns:
        [draws, vocab] int32.
    """
    # Sums and products wrap around, as they do without a sign.
    bits = keys[:, None] + torch.arange(1, vocab // 2 + 2, device=keys.device) * _STEP
    bits ^= _shifted(bits, 30)
    bits *= _FACTORS[0]
    bits ^= _shifted(bits, 27)
    bits *= _FACTORS[1]
    bits ^= _shifted(bits, 31)
    return bits.view(torch.int32)[:, :vocab]


def exponentials(bits: torch.Tensor) -> torch.Tensor:
    """Exponentially distributed numbers, float64, from 2**-33 to 22.9, one for each of the int32 `bits`."""
    odds = bits.double().mul_(-(2.0**-32)).add_(0.5 - 2.0**-33)
    return odds.log_().neg_()


def _shifted(bits: torch.Tensor, distance: int) -> torch.Tensor:
    """To the right; zeros come in, where torch's own shift repeats the sign."""
    return (bits >> distance).bitwise_and_((1 << 64 - distance) - 1)
