import pytest

from cache_manager.sessions import CachePolicy
from cache_manager.stats import PoolStats, UsageStats
from pagekeeper.common.operations import Extend, Fork, Release, Seal
from tests.fakes.policy_session import PolicySession, opening, tiny_policy, tokens


def test_before_the_first_runner_everything_is_zero() -> None:
    stats = CachePolicy(1 << 20).stats()
    assert stats.pool == PoolStats(0, 0, 0, 0, 0, 0, 0, 0)
    assert (stats.usage.utilization, stats.usage.sharing_saved) == (1.0, 0.0)
    assert stats.sessions == []


def test_every_block_but_the_null_block_is_in_one_state() -> None:
    session = PolicySession(tiny_policy(16))
    opened = session.do(opening(1, tokens(4.5)))
    session.do(Seal(1, tokens(4), opened.blocks[:4]))
    session.do(opening(2, tokens(1, base=50)))
    session.do(Release(1))
    session.idle()
    assert session.policy.stats().pool == PoolStats(
        total_blocks=16,
        free_blocks=14,
        cached_blocks=4,
        leased_blocks=1,
        sealed_blocks=0,
        quarantined_blocks=0,
        block_size=8,
        block_bytes=512,
    )


def test_resident_tokens_count_each_block_once_and_as_full_as_its_longest_sequence() -> None:
    session = PolicySession(tiny_policy(16))
    opened = session.do(opening(1, tokens(2.5)))
    session.do(Seal(1, tokens(2), opened.blocks[:2]))
    session.send(Fork(1, 20, [2, 3]), Extend(2, 22), Extend(3, 19))
    # Blocks: two sealed, the tail that 1 (20 tokens) and 3 (cut back to 19) share, and 2's copy of it with 22.
    usage = session.policy.stats().usage
    assert usage == UsageStats(
        sequences=3,
        logical_tokens=20 + 22 + 19,
        resident_tokens=16 + 4 + 6,
        logical_blocks=9,
        physical_blocks=4,
        block_size=8,
    )
    assert usage.utilization == pytest.approx(26 / 32)
    assert usage.sharing_saved == pytest.approx(1 - 4 / 9)


def test_a_held_block_is_not_referenced() -> None:
    session = PolicySession(tiny_policy(16))
    session.do(opening(1, tokens(2)))
    session.do(Release(1))
    stats = session.policy.stats()
    assert stats.pool.leased_blocks == 2
    assert (stats.usage.physical_blocks, stats.usage.resident_tokens) == (0, 0)


def test_an_open_is_counted_when_it_succeeds_and_not_at_each_attempt() -> None:
    session = PolicySession(tiny_policy(8))
    session.do(opening(1, tokens(5)))
    for _ in range(3):
        session.do(opening(2, tokens(5)))
    session.do(Release(1))
    session.idle()
    session.do(opening(2, tokens(5), reopen=True))
    counters = session.policy.stats().counters
    assert (counters.lookups, counters.reopens, counters.shortages, counters.queried_tokens) == (1, 1, 3, 80)


def test_statistics_are_of_one_moment() -> None:
    session = PolicySession(tiny_policy(8))
    before = session.policy.stats()
    session.do(opening(1, tokens(5)))
    assert before.counters.lookups == 0
