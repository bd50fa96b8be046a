"""Which tokens of a row top_k, top_p and min_p keep: those from one key upwards, found without sorting.

The last token that is kept lies in a bracket of keys, which passes over the row narrow down until it is alone there.
Most passes measure the tokens at or above three pivots that cut the bracket by value. Every fourth cuts the keys
themselves, which bounds the number of passes whatever the values, and every fourth draws the ends of the bracket in to
the tokens at them, which soon leaves one value where many tokens are equal, as bfloat16 makes them.

Simulated on 128,256 random logits, normal, rounded to bfloat16, rounded to integers or all equal: 9 to 18 passes a
filter, each of 0.5 MB out of the L2 cache.
"""

import triton
import triton.language as tl

from kernels.triton.token_order import LAST_INDEX, factor_of, token_key, value_of, weights_of

_LOWEST_KEY = tl.constexpr(-0x7FFFFFFFFFFFFFFF)
_LOWEST_VALUE = tl.constexpr(-3.4e38)
_NEGLIGIBLE = tl.constexpr(104.0)
"""exp(-104) is less than the smallest float32: such weights are 0."""
_LANES = tl.constexpr(1024)
_BUFFERS = tl.constexpr(3)
"""Tiles of logits on their way at once."""

# Counts are float32, exact up to 2**24: of integer sums of truth values LLVM makes a bit count by way of the stack.


@triton.jit
def _load(logits, start, vocab):
    # Four neighbours a lane, added up within a thread: one 16-byte load, and a quarter of the sums to hold.
    index = start + tl.arange(0, _LANES)[:, None] * 4 + tl.arange(0, 4)[None, :]
    values = tl.load(logits + index, mask=index < vocab, other=float("-inf"))
    return values, token_key(values, index)


@triton.jit
def _total(logits, vocab, highest, factor, low):
    """Count and weight of the tokens at or above `low`."""
    count = tl.zeros((_LANES,), tl.float32)
    weight = tl.zeros((_LANES,), tl.float32)
    for start in tl.range(0, vocab, _LANES * 4, num_stages=_BUFFERS):
        values, keys = _load(logits, start, vocab)
        count += tl.sum((keys >= low).to(tl.float32), 1)
        weight += tl.sum(tl.where(keys >= low, weights_of(values, highest, factor), 0), 1)
    return tl.sum(count, 0), tl.sum(weight.to(tl.float64), 0)


@triton.jit
def _measure(logits, vocab, highest, factor, a, b, c, BY_WEIGHT: tl.constexpr):
    """Count and, if that is asked for, weight of the tokens at or above each of three pivots."""
    a_count = tl.zeros((_LANES,), tl.float32)
    b_count = tl.zeros((_LANES,), tl.float32)
    c_count = tl.zeros((_LANES,), tl.float32)
    a_weight = tl.zeros((_LANES,), tl.float32)
    b_weight = tl.zeros((_LANES,), tl.float32)
    c_weight = tl.zeros((_LANES,), tl.float32)
    for start in tl.range(0, vocab, _LANES * 4, num_stages=_BUFFERS):
        values, keys = _load(logits, start, vocab)
        a_count += tl.sum((keys >= a).to(tl.float32), 1)
        b_count += tl.sum((keys >= b).to(tl.float32), 1)
        c_count += tl.sum((keys >= c).to(tl.float32), 1)
        if BY_WEIGHT:
            weights = weights_of(values, highest, factor)
            a_weight += tl.sum(tl.where(keys >= a, weights, 0), 1)
            b_weight += tl.sum(tl.where(keys >= b, weights, 0), 1)
            c_weight += tl.sum(tl.where(keys >= c, weights, 0), 1)
    counts = tl.sum(a_count, 0), tl.sum(b_count, 0), tl.sum(c_count, 0)
    if BY_WEIGHT:
        weights = (
            tl.sum(a_weight.to(tl.float64), 0),
            tl.sum(b_weight.to(tl.float64), 0),
            tl.sum(c_weight.to(tl.float64), 0),
        )
        return counts, weights
    else:
        return counts, counts


@triton.jit
def _ends(logits, vocab, low, high):
    """The lowest and the highest key of the tokens at or above `low` and below `high`."""
    lowest = tl.full((_LANES,), -_LOWEST_KEY, tl.int64)
    highest = tl.full((_LANES,), _LOWEST_KEY, tl.int64)
    for start in tl.range(0, vocab, _LANES * 4, num_stages=_BUFFERS):
        _, keys = _load(logits, start, vocab)
        inside = (keys >= low) & (keys < high)
        lowest = tl.minimum(lowest, tl.min(tl.where(inside, keys, -_LOWEST_KEY), 1))
        highest = tl.maximum(highest, tl.max(tl.where(inside, keys, _LOWEST_KEY), 1))
    return tl.min(lowest, 0), tl.max(highest, 0)


@triton.jit
def _pivot(low, high, quarters, by_value):
    """A key above `low` and below `high`, which are at least 2 apart."""
    low_value = value_of(low)
    value = low_value + (value_of(high) - low_value) * (quarters * 0.25)
    # A quarter of the difference, which itself could overflow.
    quarter = (high >> 2) - (low >> 2)
    key = tl.where(by_value, token_key(value, LAST_INDEX), low + quarter * quarters)
    return tl.minimum(tl.maximum(key, low + 1), high - 1)


@triton.jit
def _narrow(logits, vocab, highest, factor, low, high, count, target, BY_WEIGHT: tl.constexpr):
    """The highest key found at or above which the tokens still reach `target`, in number or in weight.

    The `count` tokens at or above `low` do; `high` is above all tokens.
    """
    high_count = tl.zeros((), tl.float32)
    turn = tl.zeros((), tl.int32)
    while count - high_count > 1:
        if turn % 4 == 1:
            low, high = _ends(logits, vocab, low, high)
            high += 1
        else:
            by_value = (turn % 4 != 3) & ((low >> 32) != ((high - 1) >> 32))
            a, b, c = _pivot(low, high, 1, by_value), _pivot(low, high, 2, by_value), _pivot(low, high, 3, by_value)
            counts, reached = _measure(logits, vocab, highest, factor, a, b, c, BY_WEIGHT)
            a_count, b_count, c_count = counts
            a_reached, b_reached, c_reached = reached
            if c_reached >= target:
                low, count = c, c_count
            elif b_reached >= target:
                low, count, high, high_count = b, b_count, c, c_count
            elif a_reached >= target:
                low, count, high, high_count = a, a_count, b, b_count
            else:
                high, high_count = a, a_count
        turn += 1
    return low


@triton.jit
def _key_of_least(least):
    """The lowest key of a logit of at least `least`, a float64."""
    value = tl.maximum(least, _LOWEST_VALUE).to(tl.float32)
    key = token_key(value, LAST_INDEX)
    return tl.where(value.to(tl.float64) < least, key + (1 << 32), key)


@triton.jit
def lowest_kept(logits, vocab, best, temperature, top_k, top_p, min_p):
    """The key of the last token that is kept, or one between it and the next.

    Args:
        logits: pointer to the row.
        vocab: its length.
        best: key of its likeliest token.
        temperature: above 0.
        top_k: see `kernels.interface.SamplingBatch`, as for what follows.
        top_p: the same.
        min_p: the same.
    """
    highest = value_of(best)
    factor = factor_of(temperature)
    lowest = tl.full((), _LOWEST_KEY, tl.int64)
    if ((top_k > 0) & (top_k < vocab)) | (top_p < 1):
        lowest = _key_of_least(highest.to(tl.float64) - temperature * _NEGLIGIBLE)
        count, weight = _total(logits, vocab, highest, factor, lowest)
        if (top_k > 0) & (top_k < count):
            lowest = _narrow(logits, vocab, highest, factor, lowest, best + 1, count, top_k, False)
            count, weight = _total(logits, vocab, highest, factor, lowest)
        if top_p < 1:
            lowest = _narrow(logits, vocab, highest, factor, lowest, best + 1, count, top_p * weight, True)
    if min_p > 0:
        lowest = tl.maximum(lowest, _key_of_least(highest.to(tl.float64) + temperature * tl.log(min_p)))
    return lowest
