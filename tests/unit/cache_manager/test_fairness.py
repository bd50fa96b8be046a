"""Who came first is served first, across sessions, and nobody waits for one who has stopped."""

from cache_manager.sessions import CachePolicy
from cache_manager.tickets import LAPSE_AFTER_MESSAGES
from pagekeeper.common.operations import Extend, Extended, Opened, Refused, Release, Released, Shortage
from tests.fakes.policy_session import PolicySession, opening, tiny_policy, tokens


def _full_pool() -> tuple[CachePolicy, PolicySession, PolicySession]:
    """Two sessions; the first holds four of seven blocks in sequence 1 and waits for four more for sequence 2."""
    policy = tiny_policy(8)
    first, second = PolicySession(policy), PolicySession(policy)
    first.do(opening(1, tokens(4)))
    assert first.do(opening(2, tokens(4, base=50))) == Shortage(5, 3, 0)
    return policy, first, second


def test_while_an_open_waits_younger_ones_of_any_session_wait_too() -> None:
    _, first, second = _full_pool()
    assert second.do(opening(1, tokens(1))) == Shortage(2, 3, 0)
    assert first.do(opening(3, tokens(1))) == Shortage(2, 3, 0)


def test_extends_do_not_wait() -> None:
    _, first, _ = _full_pool()
    assert isinstance(first.do(Extend(1, 33)), Extended)


def test_when_blocks_return_the_oldest_open_succeeds_first() -> None:
    _, first, second = _full_pool()
    second.do(opening(1, tokens(1)))
    first.do(Release(1))
    first.idle()
    assert isinstance(second.do(opening(1, tokens(1))), Shortage)
    assert isinstance(first.do(opening(2, tokens(4, base=50))), Opened)
    assert isinstance(second.do(opening(1, tokens(1))), Opened)


def test_a_refused_open_keeps_its_place_however_often_it_is_tried() -> None:
    _, first, second = _full_pool()
    second.do(opening(1, tokens(1)))
    for _ in range(3):
        first.do(opening(2, tokens(4, base=50)))
        second.do(opening(1, tokens(1)))
    first.do(Release(2))
    first.do(opening(3, tokens(1)))
    assert isinstance(second.do(opening(1, tokens(1))), Opened)
    assert isinstance(first.do(opening(3, tokens(1))), Opened)


def test_a_release_gives_up_the_place() -> None:
    _, first, second = _full_pool()
    assert first.do(Release(2)) == Released()
    assert isinstance(first.do(Release(2)), Refused)
    assert isinstance(second.do(opening(1, tokens(1))), Opened)


def test_the_end_of_a_session_gives_up_its_places() -> None:
    policy, first, second = _full_pool()
    policy.detach(first.epoch)
    assert isinstance(second.do(opening(1, tokens(1))), Opened)


def test_a_superseded_session_gives_up_its_places_at_once() -> None:
    policy, first, _ = _full_pool()
    assert isinstance(PolicySession(policy, supersedes=first).do(opening(1, tokens(1))), Opened)


def test_an_open_that_has_become_too_long_ever_to_fit_gives_up_its_place() -> None:
    _, first, second = _full_pool()
    assert isinstance(first.do(opening(2, tokens(7))), Refused)
    assert isinstance(second.do(opening(1, tokens(1))), Opened)
    assert first.do(Release(2)) == Released()


def test_a_place_that_is_not_renewed_lapses_after_so_many_messages_of_others() -> None:
    _, first, second = _full_pool()
    for _ in range(LAPSE_AFTER_MESSAGES - 1):
        assert isinstance(second.do(opening(1, tokens(1))), Shortage)
    assert isinstance(second.do(opening(1, tokens(1))), Opened)
    assert first.do(Release(2)) == Released()


def test_a_renewed_place_does_not_lapse() -> None:
    _, first, second = _full_pool()
    for _ in range(LAPSE_AFTER_MESSAGES - 1):
        second.do(opening(1, tokens(1)))
    first.do(opening(2, tokens(4, base=50)))
    for _ in range(LAPSE_AFTER_MESSAGES - 1):
        assert isinstance(second.do(opening(1, tokens(1))), Shortage)


def test_ones_own_messages_do_not_let_a_place_lapse() -> None:
    _, first, second = _full_pool()
    for _ in range(2 * LAPSE_AFTER_MESSAGES):
        first.send()
    assert isinstance(second.do(opening(1, tokens(1))), Shortage)


def test_a_lapsed_place_is_drawn_anew_at_the_end() -> None:
    policy, first, second = _full_pool()
    third = PolicySession(policy)
    second.do(opening(1, tokens(4)))
    for _ in range(LAPSE_AFTER_MESSAGES):
        third.send()
        second.do(opening(1, tokens(4)))
    first.do(opening(2, tokens(1)))
    assert isinstance(first.do(opening(2, tokens(1))), Shortage)
    second.do(Release(1))
    assert isinstance(first.do(opening(2, tokens(1))), Opened)
