"""What parts inside a block, and what a released sequence leaves in its tail, is copied and not computed again."""

import pytest

from cache_manager.block import BlockState
from pagekeeper.common.operations import (
    BlockCopy,
    BlockRef,
    Extend,
    Extended,
    Fork,
    Open,
    Opened,
    Release,
    Seal,
    Sealed,
    Shortage,
)
from tests.fakes.policy_session import PolicySession, opening, tiny_policy, tokens


def _refs(*ids: int, generation: int = 1) -> list[BlockRef]:
    return [BlockRef(block_id, generation) for block_id in ids]


def _serve(session: PolicySession, sequence: int, token_ids: list[int], tenant: str = "tenant") -> Opened:
    """A sequence from its Open until what it leaves behind is free; all its tokens are computed."""
    opened = session.do(opening(sequence, token_ids, tenant))
    first, full = opened.num_cached_tokens // 8, len(token_ids) // 8
    if full > first:
        session.do(Seal(sequence, token_ids[first * 8 : full * 8], opened.blocks[first:full]))
    session.do(Release(sequence, token_ids[full * 8 :]))
    session.idle()
    return opened


# What is found


def test_a_prompt_that_parts_inside_a_block_copies_its_common_part() -> None:
    session = PolicySession(tiny_policy(12))
    _serve(session, 1, tokens(3))
    parting = tokens(2)[:13] + tokens(1, base=50)
    assert session.do(opening(2, parting)) == Opened(
        13, _refs(1, 4, 5), [BlockCopy(1, BlockRef(2, 1), BlockRef(4, 1), 5)]
    )
    assert session.policy.stats().counters.hit_tokens == 13
    assert session.policy.stats().counters.copy_on_write == 0


def test_the_next_turn_of_a_conversation_computes_only_what_is_new_and_the_token_before_it() -> None:
    session = PolicySession(tiny_policy(12))
    first_turn = tokens(2.5)
    opened = session.do(Open(1, "tenant", first_turn, 19, 20))
    session.do(Seal(1, first_turn[:16], opened.blocks[:2]))
    # The last token of an answer is sampled, and never computed.
    session.do(Release(1, first_turn[16:19]))
    session.idle()
    second_turn = first_turn + tokens(1, base=50)
    assert session.do(opening(2, second_turn)) == Opened(
        19, _refs(1, 2, 4, 5), [BlockCopy(2, BlockRef(3, 1), BlockRef(4, 1), 3)]
    )


def test_a_sequence_that_reuses_part_of_a_block_seals_it_under_its_own_content() -> None:
    session = PolicySession(tiny_policy(12))
    _serve(session, 1, tokens(1.5))
    longer = tokens(1.5) + tokens(0.5, base=50)
    opened = session.do(opening(2, longer))
    assert opened == Opened(12, _refs(1, 3), [BlockCopy(1, BlockRef(2, 1), BlockRef(3, 1), 4)])
    assert session.do(Seal(2, longer[8:], _refs(3))) == Sealed(_refs(3))
    assert session.do(opening(3, longer)) == Opened(16, _refs(1, 3))


def test_two_copies_of_one_tail_that_go_on_alike_fold() -> None:
    session = PolicySession(tiny_policy(12))
    _serve(session, 1, tokens(0.5))
    source = BlockRef(1, 1)
    assert session.send(opening(2, tokens(1)), opening(3, tokens(1))) == [
        Opened(4, _refs(2), [BlockCopy(0, source, BlockRef(2, 1), 4)]),
        Opened(4, _refs(3), [BlockCopy(0, source, BlockRef(3, 1), 4)]),
    ]
    assert session.send(Seal(2, tokens(1), _refs(2)), Seal(3, tokens(1), _refs(3))) == [Sealed(_refs(2))] * 2
    assert session.policy.stats().counters.folds == 1


def test_the_longest_of_several_beginnings_is_copied() -> None:
    session = PolicySession(tiny_policy(24))
    wanted = tokens(2)
    for sequence, common in enumerate((2, 6, 4), start=1):
        _serve(session, sequence, [*wanted[: 8 + common], 90 + sequence])
    opened = session.do(opening(9, wanted))
    assert opened.num_cached_tokens == 14
    assert [copy.num_tokens for copy in opened.copies] == [6]


def test_a_sealed_block_in_use_is_copied_from_as_well() -> None:
    session = PolicySession(tiny_policy(12))
    opened = session.do(opening(1, tokens(2)))
    session.do(Seal(1, tokens(2), opened.blocks))
    assert session.do(opening(2, [*tokens(2)[:10], 90])) == Opened(
        10, _refs(1, 3), [BlockCopy(1, BlockRef(2, 1), BlockRef(3, 1), 2)]
    )


@pytest.mark.parametrize(("most", "cached"), [(0, 0), (1, 1), (7, 7), (8, 8), (9, 9), (15, 15), (16, 16)])
def test_no_more_tokens_are_taken_than_the_open_allows(most: int, cached: int) -> None:
    session = PolicySession(tiny_policy(12))
    _serve(session, 1, tokens(2))
    opened = session.do(Open(2, "tenant", tokens(2), most, 16))
    assert opened.num_cached_tokens == cached
    assert [copy.num_tokens for copy in opened.copies] == ([cached % 8] if cached % 8 else [])


def test_a_copy_has_its_block_though_no_more_slots_are_wanted() -> None:
    session = PolicySession(tiny_policy(12))
    _serve(session, 1, tokens(1.5))
    assert session.do(Open(2, "tenant", tokens(2), 15, 0)) == Opened(
        12, _refs(1, 3), [BlockCopy(1, BlockRef(2, 1), BlockRef(3, 1), 4)]
    )
    assert session.do(Extend(2, 13)) == Extended(2, [])


def test_a_tail_that_another_block_covers_is_not_kept_twice() -> None:
    session = PolicySession(tiny_policy(12))
    _serve(session, 1, tokens(1.5))
    _serve(session, 2, tokens(1.5))
    _serve(session, 3, tokens(1.25))
    assert session.policy.stats().pool.cached_blocks == 2


def test_case_05_another_tenants_equal_tokens_are_not_copied() -> None:
    """Case 5, of beginnings: at the root and after a block."""
    session = PolicySession(tiny_policy(24))
    _serve(session, 1, tokens(0.5))
    _serve(session, 2, tokens(1.5))
    for sequence, token_ids in enumerate((tokens(1), tokens(1.5), tokens(0.25)), start=10):
        opened = session.do(opening(sequence, token_ids, tenant="other"))
        assert (opened.num_cached_tokens, opened.copies) == (0, [])
    assert session.do(opening(20, tokens(0.25), tenant="tenant")).num_cached_tokens == 2


# When a tail is found


def test_a_tail_is_found_once_the_step_after_its_release_has_ended() -> None:
    session = PolicySession(tiny_policy(12))
    session.message(1, 0, opening(1, tokens(0.5)))
    session.message(2, 1, Release(1, tokens(0.5)))
    assert session.message(3, 2, opening(2, tokens(1)))[0].num_cached_tokens == 0
    assert session.policy.stats().pool.leased_blocks == 2
    assert session.message(4, 3, opening(3, tokens(1)))[0].num_cached_tokens == 4


def test_a_tail_that_a_fork_still_names_is_found_as_its_last_release_says() -> None:
    session = PolicySession(tiny_policy(12))
    session.do(opening(1, tokens(0.5)))
    session.do(Fork(1, 4, [2]))
    session.do(Release(1, tokens(0.5)))
    session.idle()
    assert session.do(opening(3, tokens(1))).num_cached_tokens == 0
    session.send(Release(2, tokens(0.25)), Release(3))
    session.idle()
    assert session.do(opening(4, tokens(1))).num_cached_tokens == 2


def test_a_release_without_its_tail_leaves_none() -> None:
    session = PolicySession(tiny_policy(12))
    session.do(opening(1, tokens(0.5)))
    session.do(Release(1))
    session.idle()
    assert session.policy.stats().pool.cached_blocks == 0


def test_case_09_a_tail_whose_writer_died_is_not_found() -> None:
    """Case 9, of tails: killed before the Release, or between it and the end of the step that may still write."""
    policy = tiny_policy(12)
    session, killed, released = (PolicySession(policy) for _ in range(3))
    killed.do(opening(1, tokens(0.5)))
    policy.detach(killed.epoch)
    released.do(opening(1, tokens(0.5)))
    released.do(Release(1, tokens(0.5)))
    policy.detach(released.epoch, quarantine=True)
    assert session.do(opening(1, tokens(1))).num_cached_tokens == 0
    policy.settle(released.epoch)
    assert session.do(opening(2, tokens(1))).num_cached_tokens == 0
    session.send(Release(1), Release(2))
    session.idle()
    assert (policy.stats().pool.free_blocks, policy.stats().pool.cached_blocks) == (11, 0)


def test_a_flush_forgets_tails_and_is_no_event() -> None:
    session = PolicySession(tiny_policy(12))
    _serve(session, 1, tokens(0.5))
    before = session.policy.stats().counters.events
    assert sum(session.policy.flush()) == 1
    assert session.policy.stats().counters.events == before
    assert session.do(opening(2, tokens(1))).num_cached_tokens == 0


def test_a_tail_is_evicted_before_what_it_follows_and_then_found_no_more() -> None:
    session = PolicySession(tiny_policy(5))
    _serve(session, 1, tokens(2.5))
    assert session.do(opening(2, tokens(2, base=50))).blocks == [BlockRef(4, 1), BlockRef(3, 2)]
    session.do(Release(2))
    session.idle()
    assert session.policy.stats().counters.evictions == 1
    assert session.do(opening(3, tokens(2.5))) == Opened(16, [*_refs(1, 2), BlockRef(3, 3)])


# While its source is held


def test_the_source_of_a_copy_is_kept_and_found_until_the_step_that_copies_has_ended() -> None:
    session = PolicySession(tiny_policy(5))
    _serve(session, 1, tokens(0.5))
    session.message(10, 9, opening(2, tokens(1)))
    pool = session.policy.stats().pool
    assert (pool.sealed_blocks, pool.leased_blocks, pool.cached_blocks) == (1, 1, 0)
    assert session.message(10, 9, Extend(2, 24)) == [Extended(1, _refs(3, 4))]
    assert session.message(10, 9, Extend(2, 25)) == [Shortage(1, 0, 1)]
    session.message(11, 11)
    assert session.policy.stats().pool.cached_blocks == 1
    assert session.message(12, 11, Extend(2, 25)) == [Extended(3, _refs(1, generation=2))]
    assert session.policy.stats().counters.evictions == 1


def test_two_sessions_hold_the_source_of_their_copies_each() -> None:
    policy = tiny_policy(12)
    first, second = PolicySession(policy), PolicySession(policy)
    _serve(first, 1, tokens(0.5))
    copies = [session.do(opening(2, tokens(1))).copies for session in (first, second)]
    assert copies == [[BlockCopy(0, BlockRef(1, 1), BlockRef(block_id, 1), 4)] for block_id in (2, 3)]
    first.idle()
    assert policy.stats().pool.sealed_blocks == 1
    second.idle()
    assert (policy.stats().pool.sealed_blocks, policy.stats().pool.cached_blocks) == (0, 1)


@pytest.mark.parametrize("quarantine", [False, True])
def test_case_10_the_death_of_a_session_pins_no_source(quarantine: bool) -> None:
    """Case 10, of beginnings: what a dead session was to copy from stays findable, and nothing stays pinned."""
    policy = tiny_policy(12)
    session, dying = PolicySession(policy), PolicySession(policy)
    _serve(session, 1, tokens(0.5))
    dying.do(opening(1, tokens(1)))
    policy.detach(dying.epoch, quarantine=quarantine)
    assert (policy.stats().pool.cached_blocks, policy.stats().pool.quarantined_blocks) == (1, int(quarantine))
    policy.settle(dying.epoch)
    assert policy.stats().pool.free_blocks == 11
    assert session.do(opening(2, tokens(1))).num_cached_tokens == 4


def test_case_10_a_refused_open_pins_no_source() -> None:
    """Case 10, of beginnings: look up, then nothing."""
    session = PolicySession(tiny_policy(6))
    _serve(session, 1, tokens(0.5))
    session.do(opening(2, tokens(3, base=50)))
    assert session.do(opening(3, tokens(2))) == Shortage(3, 2, 0)
    assert session.policy.stats().pool.cached_blocks == 1


def test_a_source_that_would_be_missed_is_not_held() -> None:
    session = PolicySession(tiny_policy(6))
    _serve(session, 1, tokens(0.5))
    # Three blocks and the watermark: with all five free one is to spare for the source, with four there is none.
    assert session.do(opening(2, tokens(3))).num_cached_tokens == 4
    session.do(Release(2))
    session.idle()
    session.do(opening(3, tokens(1, base=50)))
    assert session.do(opening(4, tokens(3))).num_cached_tokens == 0


def test_a_source_in_use_takes_no_room() -> None:
    session = PolicySession(tiny_policy(6))
    opened = session.do(opening(1, tokens(2)))
    session.do(Seal(1, tokens(2), opened.blocks))
    assert session.do(opening(2, [*tokens(2)[:12], *tokens(1, base=50)])) == Opened(
        12, _refs(1, 3, 4), [BlockCopy(1, BlockRef(2, 1), BlockRef(3, 1), 4)]
    )


def test_a_held_tail_is_sealed_though_it_is_not_full() -> None:
    session = PolicySession(tiny_policy(6))
    _serve(session, 1, tokens(0.5))
    session.do(opening(2, tokens(1)))
    ((source,),) = (list(blocks) for blocks in session.policy.blocks({BlockState.SEALED}))
    assert (source.hash, source.references, source.holds) == (None, 0, 1)
