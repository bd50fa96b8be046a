"""The audit finds what it is there to find."""

from collections.abc import Callable

import pytest

from cache_manager import state
from cache_manager.block import BlockState, Content
from cache_manager.block_pool import BlockPool
from pagekeeper.common.ids import BlockHash, BlockId
from pagekeeper.common.operations import Fork, Release, Seal
from tests.fakes.policy_session import PolicySession, opening, tiny_policy, tokens


def _busy_session() -> PolicySession:
    """Blocks 1 and 2 are sealed, 3 is leased and shared, 4 is held, 5 is cached, 6 is free and was never used."""
    session = PolicySession(tiny_policy(7))
    opened = session.do(opening(9, tokens(1, base=50)))
    pool = session.policy._pool
    assert opened.blocks[0].id == 1
    session.do(Release(9))
    session.idle()
    blocks = session.do(opening(1, tokens(2.5))).blocks
    session.do(Seal(1, tokens(2), blocks[:2]))
    session.do(Fork(1, 20, [2]))
    session.do(opening(3, tokens(1, base=70)))
    assert [block.state for block in pool.blocks].count(BlockState.FREE) == 2
    session.do(Release(3))
    return session


Damage = Callable[[BlockPool, PolicySession], None]


def _named(pool: BlockPool, state: BlockState) -> list:
    return [block for block in pool.blocks if block.state is state]


def _lose_a_reference(pool: BlockPool, _: PolicySession) -> None:
    _named(pool, BlockState.SEALED)[0].references -= 1


def _lose_a_hold(pool: BlockPool, _: PolicySession) -> None:
    next(block for block in pool.blocks if block.holds).holds = 0


def _free_what_is_referenced(pool: BlockPool, _: PolicySession) -> None:
    pool._free(_named(pool, BlockState.LEASED)[0])


def _leak(pool: BlockPool, _: PolicySession) -> None:
    pool.free_queue.remove(_named(pool, BlockState.FREE)[0])


def _miscount(pool: BlockPool, _: PolicySession) -> None:
    pool.num_in_state[BlockState.FREE] += 1


def _miscount_references(pool: BlockPool, _: PolicySession) -> None:
    pool.num_referenced += 1


def _forget_a_sealed_block(pool: BlockPool, _: PolicySession) -> None:
    block = _named(pool, BlockState.SEALED)[0]
    del pool.prefix_cache._blocks[block.hash]


def _index_a_leased_block(pool: BlockPool, _: PolicySession) -> None:
    pool.prefix_cache.add(_named(pool, BlockState.LEASED)[0], Content(bytes(36)), BlockHash(bytes(32)))


def _lose_a_link(pool: BlockPool, _: PolicySession) -> None:
    pool.prefix_cache._newest.clear()


def _count_a_tail_that_is_not_there(pool: BlockPool, _: PolicySession) -> None:
    pool.prefix_cache._num_tails += 1


def _call_what_a_table_names_a_tail(pool: BlockPool, _: PolicySession) -> None:
    block = next(block for block in _named(pool, BlockState.LEASED) if block.references)
    block.content = Content(bytes(36))


def _put_the_null_block_into_the_pool(pool: BlockPool, _: PolicySession) -> None:
    pool.blocks[0].id = BlockId(0)


def _misplace_an_entry(_: BlockPool, session: PolicySession) -> None:
    next(iter(session.policy._sessions.values())).sequences.by_id[1].blocks.reverse()


def _miscount_sealed_entries(_: BlockPool, session: PolicySession) -> None:
    next(iter(session.policy._sessions.values())).sequences.by_id[1].num_sealed = 3


def _grow_a_sequence_without_blocks(_: BlockPool, session: PolicySession) -> None:
    next(iter(session.policy._sessions.values())).sequences.by_id[1].length = 25


def _let_two_sessions_lease_a_block(pool: BlockPool, session: PolicySession) -> None:
    other = PolicySession(session.policy)
    theirs, ours = (each.sequences.by_id for each in session.policy._sessions.values())
    ours[7] = theirs[1]
    for block in theirs[1].blocks:
        pool.share(block)
    assert other.epoch == 2


def _quarantine_nobodys_block(pool: BlockPool, _: PolicySession) -> None:
    block = _named(pool, BlockState.FREE)[0]
    pool.free_queue.remove(block)
    pool._enter(block, BlockState.QUARANTINED)


@pytest.mark.parametrize(
    "damage",
    [
        _lose_a_reference,
        _lose_a_hold,
        _free_what_is_referenced,
        _leak,
        _miscount,
        _miscount_references,
        _forget_a_sealed_block,
        _index_a_leased_block,
        _lose_a_link,
        _count_a_tail_that_is_not_there,
        _call_what_a_table_names_a_tail,
        _put_the_null_block_into_the_pool,
        _misplace_an_entry,
        _miscount_sealed_entries,
        _grow_a_sequence_without_blocks,
        _let_two_sessions_lease_a_block,
        _quarantine_nobodys_block,
    ],
)
def test_a_damaged_pool_is_not_clean(damage: Damage) -> None:
    session = _busy_session()
    assert session.policy.check_integrity() == []
    damage(session.policy._pool, session)
    assert session.policy.check_integrity() != []


def test_an_audit_goes_slice_by_slice_while_messages_are_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "SLICE_BLOCKS", 4)
    session = PolicySession(tiny_policy(16))
    num_slices = 0
    for violations in session.policy.audit():
        assert violations == []
        num_slices += 1
        session.do(opening(num_slices, tokens(1.5, base=num_slices)))
    assert num_slices == 3 + 4
