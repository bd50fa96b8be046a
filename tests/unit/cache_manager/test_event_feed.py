"""Watchers of events: each at his own pace, and none for longer than he keeps up."""

import pytest

from cache_manager.event_feed import EventFeed
from cache_manager.sessions import CachePolicy
from pagekeeper.common.errors import SlowReaderError
from pagekeeper.common.operations import Release, Seal
from tests.fakes.policy_session import PolicySession, opening, tiny_policy, tokens


def _store(session: PolicySession, name: int, num_blocks: int = 1) -> None:
    token_ids = tokens(num_blocks, base=1000 * name)
    opened = session.do(opening(name, token_ids))
    session.do(Seal(name, token_ids, opened.blocks))


def _is_listened_to(policy: CachePolicy) -> bool:
    return policy._pool.listener is not None


async def test_every_watcher_gets_every_event_from_his_first_moment_on() -> None:
    session = PolicySession(tiny_policy(32))
    feed = EventFeed(session.policy)
    with feed.watch() as early:
        _store(session, 1)
        with feed.watch() as late:
            _store(session, 2)
            assert [event.number for event in await late.next_events()] == [2]
        _store(session, 3)
        assert [event.number for event in await early.next_events()] == [1, 2, 3]


async def test_nobody_is_told_when_the_last_watcher_has_left() -> None:
    policy = tiny_policy(8)
    feed = EventFeed(policy)
    assert not _is_listened_to(policy)
    with feed.watch():
        with feed.watch():
            pass
        assert _is_listened_to(policy)
    assert not _is_listened_to(policy)


async def test_a_watcher_too_slow_is_told_so_and_the_others_go_on() -> None:
    session = PolicySession(tiny_policy(64))
    feed = EventFeed(session.policy, buffer_events=4)
    with feed.watch() as slow, feed.watch() as quick:
        for name in range(1, 8):
            _store(session, name)
            assert [event.number for event in await quick.next_events()] == [name]
        assert len(slow._events) == 0
        for _ in range(2):
            with pytest.raises(SlowReaderError, match="4 events"):
                await slow.next_events()


async def test_many_events_are_taken_in_several_goes() -> None:
    session = PolicySession(tiny_policy(1000))
    with EventFeed(session.policy).watch() as watcher:
        _store(session, 1, num_blocks=900)
        first, second = await watcher.next_events(), await watcher.next_events()
        assert [event.number for event in first + second] == list(range(1, 901))
        assert len(first) == 512


async def test_a_flushed_slice_is_one_event_and_comes_by_itself() -> None:
    session = PolicySession(tiny_policy(3000))
    _store(session, 1, num_blocks=2500)
    session.do(Release(1))
    session.idle()
    with EventFeed(session.policy).watch() as watcher:
        assert list(session.policy.flush()) == [2048, 452]
        taken = [await watcher.next_events(), await watcher.next_events()]
        assert [[len(event.block_hashes) for event in events] for events in taken] == [[2048], [452]]
