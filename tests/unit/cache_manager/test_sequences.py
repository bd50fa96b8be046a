"""Each operation, on one session: exact blocks in exact order."""

import pytest

from pagekeeper.common.operations import (
    BlockCopy,
    BlockRef,
    Extend,
    Extended,
    Fork,
    Forked,
    Open,
    Opened,
    Operation,
    Refused,
    Release,
    Released,
    Seal,
    Sealed,
    Shortage,
)
from tests.fakes.policy_session import PolicySession, opening, tiny_policy, tokens


def _refs(*ids: int, generation: int = 1) -> list[BlockRef]:
    return [BlockRef(block_id, generation) for block_id in ids]


def _sealed(session: PolicySession, sequence: int, token_ids: list[int]) -> list[BlockRef]:
    """Open a sequence and seal all its full blocks."""
    opened = session.do(opening(sequence, token_ids))
    full = len(token_ids) // 8
    cached = opened.num_cached_tokens // 8
    session.do(Seal(sequence, token_ids[cached * 8 : full * 8], opened.blocks[cached:full]))
    return opened.blocks


# Open


def test_an_open_grants_fresh_blocks_for_all_its_tokens() -> None:
    session = PolicySession(tiny_policy(8))
    assert session.do(opening(1, tokens(2.5))) == Opened(0, _refs(1, 2, 3))


def test_an_open_grants_only_what_the_next_chunk_needs_but_needs_room_for_all() -> None:
    session = PolicySession(tiny_policy(8))
    assert session.do(Open(1, "tenant", tokens(5), 0, 9)) == Opened(0, _refs(1, 2))
    assert session.do(Open(2, "tenant", tokens(5), 0, 9)) == Shortage(6, 5, 0)


def test_an_open_takes_the_longest_sealed_prefix() -> None:
    session = PolicySession(tiny_policy(12))
    _sealed(session, 1, tokens(3.5))
    assert session.do(opening(2, tokens(2) + tokens(1, base=50))) == Opened(16, _refs(1, 2, 5))
    assert session.do(Open(3, "tenant", tokens(4), 32, 1)) == Opened(24, _refs(1, 2, 3, 6))


def test_an_open_takes_no_more_tokens_than_it_allows() -> None:
    session = PolicySession(tiny_policy(12))
    _sealed(session, 1, tokens(2))
    assert session.do(Open(2, "tenant", tokens(2), 8, 16)) == Opened(8, _refs(1, 3))
    assert session.do(Open(3, "tenant", tokens(2), 0, 16)) == Opened(0, _refs(4, 5))


def test_another_tenant_finds_nothing() -> None:
    session = PolicySession(tiny_policy(12))
    _sealed(session, 1, tokens(2))
    assert session.do(opening(2, tokens(2), tenant="other")).num_cached_tokens == 0


def test_blocks_that_are_not_sealed_are_not_found() -> None:
    session = PolicySession(tiny_policy(12))
    session.do(opening(1, tokens(2)))
    assert session.do(opening(2, tokens(2))) == Opened(0, _refs(3, 4))


def test_hits_on_blocks_in_use_need_no_room_and_hits_on_free_ones_do() -> None:
    session = PolicySession(tiny_policy(6))
    _sealed(session, 1, tokens(3))
    # 2 blocks are free and one is the watermark: with 3 blocks in use only the fourth needs room.
    assert session.do(opening(2, tokens(4))) == Opened(24, _refs(1, 2, 3, 4))
    session.send(Release(1), Release(2))
    session.idle()
    assert session.do(opening(3, tokens(4))) == Opened(24, [*_refs(1, 2, 3), BlockRef(5, 1)])
    session.do(Release(3))
    session.idle()
    # Nothing is in use now, so the three cached blocks are themselves among the free ones that must be enough.
    session.do(opening(4, tokens(1, base=50)))
    assert session.do(opening(5, tokens(4))) == Shortage(5, 4, 0)


def test_an_open_leaves_the_watermark_free_and_an_extend_does_not() -> None:
    session = PolicySession(tiny_policy(8, watermark=0.3))
    assert session.attachment.watermark_blocks == 2
    assert session.do(opening(1, tokens(3))) == Opened(0, _refs(1, 2, 3))
    assert session.do(opening(2, tokens(3))) == Shortage(5, 4, 0)
    session.do(Release(2))
    assert session.do(Extend(1, 7 * 8)) == Extended(3, _refs(4, 5, 6, 7))
    assert session.do(Extend(1, 7 * 8 + 1)) == Shortage(1, 0, 0)


def test_an_open_that_can_never_fit_is_refused_though_the_pool_is_empty() -> None:
    session = PolicySession(tiny_policy(8))
    assert session.do(opening(1, tokens(6.5))) == Refused("52 tokens need 7 blocks; no sequence can have over 6")
    assert isinstance(session.do(opening(1, tokens(6))), Opened)


@pytest.mark.parametrize(
    ("operation", "reason"),
    [
        (opening(1, tokens(1)), "is open already"),
        (opening(2, []), "at least one token"),
        (opening(2, [-1]), "32-bit"),
        (opening(2, [2**32]), "32-bit"),
        (opening(2, tokens(7)), "no sequence can have over 6"),
        (Extend(9, 8), "sequence 9 is not open"),
        (Extend(1, 0), "at least one token"),
        (Seal(9, tokens(1), _refs(1)), "sequence 9 is not open"),
        (Seal(1, tokens(1), _refs(1, 2)), "2 blocks hold 16 tokens, not 8"),
        (Seal(1, tokens(4), _refs(1, 2, 3, 4)), "no 4 full blocks after its 0 sealed ones"),
        (Seal(1, tokens(1), _refs(2)), "block 2.1 is stale"),
        (Seal(1, tokens(1), _refs(1, generation=0)), "block 1.0 is stale"),
        (Seal(1, [2**32] * 8, _refs(1)), "32-bit"),
        (Fork(9, 8, [2]), "sequence 9 is not open"),
        (Fork(1, 25, [2]), "no slots for 25 tokens"),
        (Fork(1, 0, [2]), "no slots for 0 tokens"),
        (Fork(1, 20, [1]), "children of a fork are new"),
        (Fork(1, 20, [2, 2]), "children of a fork are new"),
        (Release(9), "sequence 9 is not open"),
        (Release(1, tokens(1)), "no 8 tokens after its last full block"),
        (Release(1, [2**32]), "32-bit"),
    ],
)
def test_what_no_correct_runner_sends_is_refused_and_changes_nothing(operation: Operation, reason: str) -> None:
    session = PolicySession(tiny_policy(8))
    session.do(opening(1, tokens(2.5)))
    before = session.policy.stats()
    result = session.do(operation)
    assert isinstance(result, Refused)
    assert reason in result.reason
    assert session.policy.stats() == before


# Extend


def test_slots_of_the_last_block_are_filled_without_a_message() -> None:
    session = PolicySession(tiny_policy(8))
    session.do(opening(1, tokens(1.5)))
    assert session.do(Seal(1, tokens(2), _refs(1, 2))) == Sealed(_refs(1, 2))
    assert session.policy.stats().usage.logical_tokens == 16
    assert session.do(Extend(1, 17)) == Extended(2, _refs(3))
    assert session.do(Fork(1, 24, [2])) == Forked()


def test_an_extend_within_the_last_block_grants_nothing() -> None:
    session = PolicySession(tiny_policy(8))
    session.do(opening(1, tokens(1.5)))
    assert session.do(Extend(1, 16)) == Extended(2, [])


def test_a_lower_extend_gives_slots_back() -> None:
    session = PolicySession(tiny_policy(8))
    session.do(opening(1, tokens(1.5)))
    assert session.do(Extend(1, 40)) == Extended(2, _refs(3, 4, 5))
    assert session.do(Extend(1, 13)) == Extended(2, [])
    assert session.do(Extend(1, 17)) == Extended(2, _refs(6))


def test_an_extend_that_is_short_changes_nothing() -> None:
    session = PolicySession(tiny_policy(6))
    session.do(opening(1, tokens(1.5)))
    assert session.do(Extend(1, 49)) == Shortage(5, 3, 0)
    assert session.do(Extend(1, 2**32 - 1)) == Shortage(2**29 - 2, 3, 0)
    assert session.do(Extend(1, 40)) == Extended(2, _refs(3, 4, 5))


# Seal


def test_sealed_blocks_keep_their_names() -> None:
    session = PolicySession(tiny_policy(8))
    session.do(opening(1, tokens(2.5)))
    assert session.do(Seal(1, tokens(2), _refs(1, 2))) == Sealed(_refs(1, 2))
    assert session.policy.stats().pool.sealed_blocks == 2


def test_blocks_are_sealed_in_the_order_of_the_table() -> None:
    session = PolicySession(tiny_policy(8))
    session.do(opening(1, tokens(3)))
    assert session.do(Seal(1, tokens(1), _refs(1))) == Sealed(_refs(1))
    assert isinstance(session.do(Seal(1, tokens(1), _refs(1))), Refused)
    assert session.do(Seal(1, tokens(3)[8:], _refs(2, 3))) == Sealed(_refs(2, 3))
    assert session.do(opening(2, tokens(3))).num_cached_tokens == 24


def test_content_that_is_sealed_already_folds_onto_the_older_block() -> None:
    session = PolicySession(tiny_policy(12))
    session.do(opening(1, tokens(2)))
    session.do(opening(2, tokens(2)))
    session.do(Seal(1, tokens(2), _refs(1, 2)))
    assert session.do(Seal(2, tokens(2), _refs(3, 4))) == Sealed(_refs(1, 2))
    stats = session.policy.stats()
    assert (stats.counters.folds, stats.counters.seals) == (2, 2)
    assert (stats.pool.sealed_blocks, stats.pool.leased_blocks) == (2, 2)
    session.idle()
    assert session.policy.stats().pool.leased_blocks == 0


def test_a_fold_takes_a_cached_block_back_into_use() -> None:
    session = PolicySession(tiny_policy(8))
    _sealed(session, 1, tokens(2))
    session.do(Release(1))
    session.idle()
    assert session.do(Open(2, "tenant", tokens(2), 8, 8)) == Opened(8, _refs(1, 3))
    assert session.do(Seal(2, tokens(2)[8:], _refs(3))) == Sealed(_refs(2))


def test_a_duplicate_lives_until_its_last_reference() -> None:
    session = PolicySession(tiny_policy(12))
    session.do(opening(1, tokens(1)))
    session.do(opening(2, tokens(1)))
    session.do(Fork(2, 8, [3]))
    session.do(Seal(1, tokens(1), _refs(1)))
    assert session.do(Seal(2, tokens(1), _refs(2))) == Sealed(_refs(1))
    session.idle()
    assert session.policy.stats().pool.leased_blocks == 1
    assert session.do(Extend(3, 9)) == Extended(1, _refs(3))
    assert session.do(Seal(3, tokens(1), _refs(2))) == Sealed(_refs(1))
    session.idle()
    assert session.policy.stats().pool.leased_blocks == 1


def test_sealing_a_block_that_a_fork_has_sealed_only_advances_the_chain() -> None:
    session = PolicySession(tiny_policy(12))
    session.do(opening(1, tokens(2)))
    session.do(Fork(1, 16, [2]))
    session.do(Seal(1, tokens(1), _refs(1)))
    assert isinstance(session.do(Seal(2, tokens(1, base=5), _refs(1))), Refused)
    assert session.do(Seal(2, tokens(2), _refs(1, 2))) == Sealed(_refs(1, 2))
    assert session.do(Seal(1, tokens(2)[8:], _refs(2))) == Sealed(_refs(2))
    assert session.policy.stats().counters.seals == 2


# Fork


def test_a_shared_tail_is_copied_before_the_write() -> None:
    session = PolicySession(tiny_policy(12))
    session.do(opening(1, tokens(1.5)))
    assert session.do(Fork(1, 12, [2, 3])) == Forked()
    source = BlockRef(2, 1)
    assert session.send(Extend(1, 13), Extend(2, 13), Extend(3, 13)) == [
        Extended(2, [], [BlockCopy(1, source, BlockRef(3, 1), 4)]),
        Extended(2, [], [BlockCopy(1, source, BlockRef(4, 1), 4)]),
        Extended(2, []),  # the last reference writes in place
    ]
    assert session.policy.stats().counters.copy_on_write == 2


def test_a_copy_comes_before_the_fresh_blocks_it_needs() -> None:
    session = PolicySession(tiny_policy(12))
    session.do(opening(1, tokens(1.5)))
    session.do(Fork(1, 12, [2]))
    copy = BlockCopy(1, BlockRef(2, 1), BlockRef(3, 1), 4)
    assert session.do(Extend(2, 25)) == Extended(2, _refs(4, 5), [copy])


def test_a_fork_at_the_end_of_a_block_needs_no_copy() -> None:
    session = PolicySession(tiny_policy(12))
    session.do(opening(1, tokens(2)))
    session.do(Fork(1, 16, [2]))
    assert session.send(Extend(1, 17), Extend(2, 17)) == [Extended(2, _refs(3)), Extended(2, _refs(4))]


def test_the_parent_is_cut_back_before_the_fork() -> None:
    session = PolicySession(tiny_policy(12))
    session.do(opening(1, tokens(3)))
    session.do(Fork(1, 12, [2]))
    stats = session.policy.stats()
    assert (stats.usage.logical_blocks, stats.usage.physical_blocks, stats.usage.logical_tokens) == (4, 2, 24)


def test_a_sealed_tail_is_copied_even_by_its_only_reference() -> None:
    session = PolicySession(tiny_policy(12))
    session.do(opening(1, tokens(2)))
    session.do(Seal(1, tokens(2), _refs(1, 2)))
    session.do(Extend(1, 12))
    assert session.do(Extend(1, 13)) == Extended(2, [], [BlockCopy(1, BlockRef(2, 1), BlockRef(3, 1), 4)])
    session.do(Extend(1, 16))
    other = [*tokens(2)[8:12], 7, 7, 7, 7]
    assert session.do(Seal(1, other, _refs(3))) == Sealed(_refs(3))
    assert session.do(opening(2, tokens(2))).num_cached_tokens == 16
    assert session.do(opening(3, tokens(1) + other)).num_cached_tokens == 16


def test_a_copy_that_is_short_changes_nothing() -> None:
    session = PolicySession(tiny_policy(6))
    session.do(opening(1, tokens(4)))
    session.do(Fork(1, 28, [2]))
    assert session.do(Extend(2, 33)) == Shortage(2, 1, 0)
    assert session.do(Extend(2, 29)) == Extended(4, [], [BlockCopy(3, BlockRef(4, 1), BlockRef(5, 1), 4)])


# Release


def test_a_released_sequence_is_gone_and_its_id_can_be_opened_again() -> None:
    session = PolicySession(tiny_policy(8))
    _sealed(session, 1, tokens(2.5))
    assert session.do(Release(1, tokens(0.5))) == Released()
    assert isinstance(session.do(Extend(1, 8)), Refused)
    assert session.do(opening(1, tokens(2.5), reopen=True)).num_cached_tokens == 16
    counters = session.policy.stats().counters
    assert (counters.lookups, counters.reopens, counters.queried_tokens, counters.hit_tokens) == (1, 1, 40, 16)


def test_a_chain_is_eaten_from_its_end() -> None:
    session = PolicySession(tiny_policy(6))
    _sealed(session, 1, tokens(4))
    session.do(Release(1))
    session.idle()
    assert session.do(Open(2, "tenant", tokens(3, base=50), 0, 24)) == Opened(
        0, [*_refs(5), *_refs(4, 3, generation=2)]
    )
    session.do(Release(2))
    session.idle()
    assert session.do(opening(3, tokens(4))).num_cached_tokens == 16
    assert session.policy.stats().counters.evictions == 2


def test_the_least_recently_used_chain_goes_first() -> None:
    session = PolicySession(tiny_policy(6))
    _sealed(session, 1, tokens(2))
    _sealed(session, 2, tokens(2, base=50))
    session.do(Release(1))
    session.do(Release(2))
    session.do(opening(3, tokens(2)))
    session.do(Release(3))
    session.idle()
    assert session.do(opening(4, tokens(3, base=100))) == Opened(0, [*_refs(5), *_refs(4, 3, generation=2)])


def test_generations_rise_each_time_a_block_is_granted_anew_and_not_when_it_is_found() -> None:
    session = PolicySession(tiny_policy(3))
    for generation in (1, 2, 3):
        opened = session.do(opening(1, tokens(1, base=generation)))
        block_id = 1 + (generation - 1) % 2
        assert opened.blocks == [BlockRef(block_id, (generation + 1) // 2)]
        session.do(Release(1))
        session.idle()
    _sealed(session, 2, tokens(1))
    session.do(Release(2))
    session.idle()
    assert session.do(opening(3, tokens(1))).blocks == [BlockRef(2, 2)]
