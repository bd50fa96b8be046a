"""What a listener is told of the index, and that nobody is told when nobody listens."""

from cache_manager.events import BlocksRemoved, BlockStored, CacheCleared, CacheEvent
from cache_manager.prefix_cache import chain, root_hash, tenant_root
from kernels.kv_layout import KvLayout
from pagekeeper.common.operations import Release, Seal
from tests.fakes.local_cache import FINGERPRINT, TINY_LAYOUT
from tests.fakes.policy_session import BLOCK_SIZE, PolicySession, opening, tiny_policy, tokens

ROOT = tenant_root(root_hash(FINGERPRINT, TINY_LAYOUT), "tenant")


def _listened(num_blocks: int = 8) -> tuple[PolicySession, list[CacheEvent]]:
    events: list[CacheEvent] = []
    policy = tiny_policy(num_blocks)
    policy.listen(events.append)
    return PolicySession(policy), events


def _store(session: PolicySession, name: int, token_ids: list[int]) -> None:
    opened = session.do(opening(name, token_ids))
    num_cached = opened.num_cached_tokens
    session.do(Seal(name, token_ids[num_cached:], opened.blocks[num_cached // BLOCK_SIZE :]))
    session.do(Release(name))
    session.idle()


def test_a_stored_block_comes_with_its_tokens_its_hash_and_its_parents() -> None:
    session, events = _listened()
    _store(session, 1, tokens(2))
    (first, _), (second, _) = chain(ROOT, "tenant", tokens(2), BLOCK_SIZE)
    assert events == [
        BlockStored(1, first, None, "tenant", tokens(2)[:8]),
        BlockStored(2, second, first, "tenant", tokens(2)[8:]),
    ]


def test_a_chain_goes_on_where_it_was_found() -> None:
    session, events = _listened()
    _store(session, 1, tokens(1))
    _store(session, 2, tokens(2))
    ((first, _),) = chain(ROOT, "tenant", tokens(1), BLOCK_SIZE)
    assert [event.parent_hash for event in events] == [None, first]


def test_what_is_stored_already_is_no_event() -> None:
    session, events = _listened(16)
    one, other = session.send(opening(1, tokens(2)), opening(2, tokens(2)))
    session.send(Seal(1, tokens(2), one.blocks), Seal(2, tokens(2), other.blocks))
    assert [event.number for event in events] == [1, 2]


def test_a_cached_block_that_is_granted_anew_is_removed() -> None:
    session, events = _listened(8)
    _store(session, 1, tokens(6))
    stored = [event.block_hash for event in events]
    session.do(opening(2, tokens(3, base=500)))
    # One block was never used; the chain is eaten from its end.
    assert events[6:] == [BlocksRemoved(7, [stored[5]]), BlocksRemoved(8, [stored[4]])]


def test_a_flush_removes_what_is_cached_and_leaves_what_is_in_use() -> None:
    session, events = _listened(8)
    _store(session, 1, tokens(3))
    stored = [event.block_hash for event in events]
    session.do(opening(2, tokens(1)))
    assert sum(session.policy.flush()) == 2
    assert events[3:] == [BlocksRemoved(4, [stored[2], stored[1]])]
    assert session.policy.check_integrity() == []
    assert session.do(opening(3, tokens(3))).num_cached_tokens == 8
    assert sum(session.policy.flush()) == 0
    assert len(events) == 4


def test_a_pool_carved_anew_is_cleared_and_the_listener_stays() -> None:
    session, events = _listened(16)
    _store(session, 1, tokens(2))
    session.policy.detach(session.epoch)
    other = KvLayout(num_layers=1, num_kv_heads=1, block_size=8, head_dim=4, dtype="float32")
    heir = PolicySession(session.policy, layout=other)
    _store(heir, 1, tokens(1))
    assert events[2] == CacheCleared(3)
    assert events[3].number == 4


def test_a_pool_that_held_nothing_is_not_cleared() -> None:
    session, events = _listened()
    session.policy.detach(session.epoch)
    PolicySession(session.policy, layout=KvLayout(1, 1, 8, 4, "float32"))
    assert events == []


def test_numbers_rise_while_nobody_listens() -> None:
    session, events = _listened()
    session.policy.listen(None)
    _store(session, 1, tokens(2))
    assert events == []
    session.policy.listen(events.append)
    _store(session, 2, tokens(1, base=70))
    assert [event.number for event in events] == [3]
