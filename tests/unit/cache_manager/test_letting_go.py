"""What a message lets go stays held until the step it planned has been reported as ended."""

from pagekeeper.common.operations import BlockRef, Extend, Extended, Fork, Open, Opened, Release, Seal, Shortage
from tests.fakes.policy_session import PolicySession, opening, tiny_policy, tokens


def _free(session: PolicySession) -> int:
    return session.policy.stats().pool.free_blocks


def test_a_released_block_is_free_once_the_step_after_the_message_has_ended() -> None:
    session = PolicySession(tiny_policy(8))
    session.message(1, 0, opening(1, tokens(2)))
    session.message(2, 1, Release(1))
    assert _free(session) == 5
    session.message(3, 2)
    assert _free(session) == 5
    session.message(3, 3)
    assert _free(session) == 7


def test_ended_steps_are_counted_before_the_operations_of_the_same_message() -> None:
    session = PolicySession(tiny_policy(8))
    session.message(1, 0, opening(1, tokens(6)))
    session.message(2, 1, Release(1))
    assert session.message(4, 2, opening(2, tokens(6))) == [Shortage(7, 1, 6)]
    assert isinstance(session.message(4, 3, opening(2, tokens(6)))[0], Opened)


def test_a_block_let_go_in_a_message_is_not_granted_in_the_same_message() -> None:
    session = PolicySession(tiny_policy(8))
    session.message(1, 0, opening(1, tokens(6)))
    results = session.message(2, 1, Release(1), opening(2, tokens(3)))
    assert results[1] == Shortage(4, 1, 6)


def test_the_source_of_a_copy_is_held_for_the_step_that_copies() -> None:
    session = PolicySession(tiny_policy(8))
    session.message(1, 0, opening(1, tokens(1.5)))
    session.message(2, 1, Fork(1, 12, [2]), Extend(1, 13), Release(2))
    assert session.policy.stats().pool.leased_blocks == 3
    session.message(3, 2)
    assert session.policy.stats().pool.leased_blocks == 3
    session.message(4, 3)
    assert session.policy.stats().pool.leased_blocks == 2


def test_a_hold_does_not_keep_the_last_table_from_writing_in_place() -> None:
    session = PolicySession(tiny_policy(8))
    session.message(1, 0, opening(1, tokens(1.5)))
    session.message(2, 1, Fork(1, 12, [2]), Release(1))
    assert session.message(2, 2, Extend(2, 13)) == [Extended(2, [])]


def test_slots_given_back_are_held() -> None:
    session = PolicySession(tiny_policy(8))
    session.message(1, 0, opening(1, tokens(4)))
    session.message(2, 1, Extend(1, 9))
    assert _free(session) == 3
    session.message(3, 3)
    assert _free(session) == 5


def test_a_folded_duplicate_is_held() -> None:
    session = PolicySession(tiny_policy(8))
    session.message(1, 0, opening(1, tokens(1)), opening(2, tokens(1)))
    session.message(2, 1, Seal(1, tokens(1), [BlockRef(1, 1)]), Seal(2, tokens(1), [BlockRef(2, 1)]))
    assert session.policy.stats().pool.leased_blocks == 1
    session.message(3, 3)
    assert session.policy.stats().pool.leased_blocks == 0


def test_a_released_sealed_block_is_found_while_it_is_held_and_needs_no_room() -> None:
    session = PolicySession(tiny_policy(4))
    session.message(1, 0, opening(1, tokens(2)))
    session.message(2, 1, Seal(1, tokens(2), [BlockRef(1, 1), BlockRef(2, 1)]), Release(1))
    assert session.message(2, 1, Open(2, "tenant", tokens(2), 16, 0)) == [Opened(16, [BlockRef(1, 1), BlockRef(2, 1)])]
    session.message(4, 4)
    assert session.policy.stats().pool.sealed_blocks == 2


def test_each_session_holds_for_itself() -> None:
    policy = tiny_policy(4)
    first, second = PolicySession(policy), PolicySession(policy)
    first.message(1, 0, opening(1, tokens(2)))
    first.message(2, 1, Seal(1, tokens(2), [BlockRef(1, 1), BlockRef(2, 1)]))
    second.message(1, 0, opening(1, tokens(2)))
    first.message(3, 2, Release(1))
    second.message(2, 1, Release(1))
    first.message(4, 4)
    assert policy.stats().pool.sealed_blocks == 2
    second.message(3, 3)
    assert policy.stats().pool.free_blocks == 3


def test_case_10_a_look_up_that_leads_to_nothing_pins_nothing_and_a_hit_is_delivered() -> None:
    """Case 10: look up, then nothing, abort or evict."""
    policy = tiny_policy(6)
    session, other = PolicySession(policy), PolicySession(policy)
    opened = session.do(opening(1, tokens(4)))
    session.do(Seal(1, tokens(4), opened.blocks))
    session.do(Release(1))
    session.idle()
    assert policy.stats().pool.cached_blocks == 4

    assert isinstance(other.do(opening(9, tokens(2, base=70))), Opened)
    assert isinstance(session.do(opening(2, tokens(4))), Shortage)
    session.do(Release(2))
    assert policy.stats().usage.physical_blocks == 2

    hit = session.do(opening(3, tokens(2)))
    assert hit == Opened(16, [BlockRef(1, 1), BlockRef(2, 1)])
    assert isinstance(other.do(Extend(9, 4 * 8)), Shortage)
    assert session.do(opening(4, tokens(2))) == hit

    session.send(Release(3), Release(4))
    other.do(Release(9))
    session.idle()
    other.idle()
    assert policy.stats().pool.free_blocks == 5
