"""When decodes read a common prefix once."""

import numpy as np
import pytest

from model_runner.shared_prefix import MIN_DECODES, MIN_SAVED_TOKENS, MIN_SHARED_TOKENS, count_shared_blocks

SIZE = 16


def count(num_decodes: int, shared_tokens: int, own_tokens: int = 40, ends: list[int] | None = None) -> int:
    """Sequences that begin with `shared_tokens` in common, a multiple of the block size, and go on by themselves."""
    shared, own = shared_tokens // SIZE, -(-own_tokens // SIZE)
    tables = np.arange(1000, 1000 + num_decodes * (shared + own)).reshape(num_decodes, shared + own)
    tables[:, :shared] = np.arange(1, shared + 1)
    context_ends = np.array(ends or [shared_tokens + own_tokens] * num_decodes)
    return count_shared_blocks(tables, context_ends, SIZE)


def test_what_all_have_in_common_is_shared() -> None:
    assert count(64, 512) == 32
    assert count(MIN_DECODES, 8192) == 512


def test_nothing_in_common_shares_nothing() -> None:
    assert count(64, 0) == 0


def test_a_common_block_after_a_difference_does_not_count() -> None:
    tables = np.tile(np.arange(1, 33), (64, 1))
    tables[5, 20] = 99
    assert count_shared_blocks(tables, np.full(64, 500), SIZE) == 20


@pytest.mark.parametrize(
    ("num_decodes", "shared_tokens"),
    [
        (MIN_DECODES - 1, 8192),
        (256, MIN_SHARED_TOKENS - SIZE),
        (MIN_DECODES, MIN_SAVED_TOKENS // (MIN_DECODES - 1) // SIZE * SIZE),
    ],
)
def test_too_little_to_save_does_not_pay(num_decodes: int, shared_tokens: int) -> None:
    assert count(num_decodes, shared_tokens) == 0


def test_the_block_of_a_new_token_is_never_shared() -> None:
    ends = [600] * 64
    ends[9] = 513  # its new token is the first of block 32
    tables = np.tile(np.arange(1, 39), (64, 1))
    assert count_shared_blocks(tables, np.array(ends), SIZE) == 32
    ends[9] = 512  # its new token is the last of block 31
    assert count_shared_blocks(tables, np.array(ends), SIZE) == 31


def test_no_decodes_share_nothing() -> None:
    assert count_shared_blocks(np.zeros((0, 0), np.int64), np.zeros(0, np.int64), SIZE) == 0
