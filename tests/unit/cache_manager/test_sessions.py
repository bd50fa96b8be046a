"""Attaching, the order of messages, and the ends of sessions."""

from dataclasses import replace

import pytest

from cache_manager.sessions import CachePolicy, ProtocolViolation
from pagekeeper.common.errors import ConfigurationError
from pagekeeper.common.ids import Epoch
from pagekeeper.common.operations import BlockRef, Extend, Fork, Open, Opened, Release, Seal, StepMessage
from tests.fakes.local_cache import FINGERPRINT, TINY_LAYOUT
from tests.fakes.policy_session import PolicySession, opening, tiny_policy, tokens


def _sealed(session: PolicySession, sequence: int, token_ids: list[int]) -> None:
    session.do(Seal(sequence, token_ids, session.do(opening(sequence, token_ids)).blocks))


# Messages


@pytest.mark.parametrize(
    ("number", "step", "completed_step"),
    [(1, 3, 2), (3, 3, 2), (0, 3, 2), (2, 1, 1), (2, 3, 0), (2, 3, 4)],
    ids=["again", "gap", "zero", "step falls", "completed step falls", "completed step was never launched"],
)
def test_a_message_out_of_order_is_an_error_and_changes_nothing(number: int, step: int, completed_step: int) -> None:
    session = PolicySession(tiny_policy(8))
    session.message(2, 1, opening(1, tokens(1)))
    before = session.policy.stats()
    with pytest.raises(ProtocolViolation):
        session.policy.apply(session.epoch, StepMessage(number, step, completed_step, [Release(1)]))
    assert session.policy.stats() == before
    session.message(3, 2, Release(1))


def test_an_operation_of_an_ended_session_fails() -> None:
    session = PolicySession(tiny_policy(8))
    session.policy.detach(session.epoch)
    with pytest.raises(ProtocolViolation, match="session 1 has ended"):
        session.do(opening(1, tokens(1)))


def test_an_operation_of_a_session_that_never_was_fails() -> None:
    with pytest.raises(ProtocolViolation, match="session 7 has ended"):
        tiny_policy(8).apply(Epoch(7), StepMessage(1, 0, 0, []))


def test_operations_of_one_message_are_applied_in_their_order() -> None:
    session = PolicySession(tiny_policy(8))
    session.send(opening(1, tokens(1)))
    results = session.send(
        Seal(1, tokens(1), [BlockRef(1, 1)]), Release(1), opening(2, tokens(2)), Fork(2, 12, [3]), Extend(3, 13)
    )
    assert [type(result).__name__ for result in results] == ["Sealed", "Released", "Opened", "Forked", "Extended"]
    assert results[2].num_cached_tokens == 8


# Attaching


def test_epochs_rise() -> None:
    policy = tiny_policy(8)
    epochs = [PolicySession(policy).epoch for _ in range(3)]
    policy.detach(epochs[2])
    assert [*epochs, PolicySession(policy).epoch] == [1, 2, 3, 4]


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "block_size", "head_dim", "dtype"])
def test_a_second_layout_is_refused_by_the_name_of_its_field(field: str) -> None:
    policy = tiny_policy(64)
    PolicySession(policy)
    other = replace(TINY_LAYOUT, **{field: {"block_size": 16, "dtype": "float16"}.get(field, 16)})
    with pytest.raises(ConfigurationError, match=f"^{field}: "):
        PolicySession(policy, layout=other)


@pytest.mark.parametrize("field", ["model_config", "weights", "compute_dtype"])
def test_a_second_fingerprint_is_refused_by_the_name_of_its_field(field: str) -> None:
    policy = tiny_policy(8)
    PolicySession(policy)
    with pytest.raises(ConfigurationError, match=f"^{field}: the pool holds blocks for .*, this runner has 'other'"):
        PolicySession(policy, fingerprint=replace(FINGERPRINT, **{field: "other"}))


def test_the_cache_outlives_its_sessions() -> None:
    policy = tiny_policy(8)
    first = PolicySession(policy)
    _sealed(first, 1, tokens(3))
    policy.detach(first.epoch)
    assert PolicySession(policy).do(opening(1, tokens(4))).num_cached_tokens == 24


def test_with_no_session_left_another_layout_carves_the_pool_anew() -> None:
    policy = tiny_policy(16)
    first = PolicySession(policy)
    _sealed(first, 1, tokens(3))
    policy.detach(first.epoch)
    second = PolicySession(policy, layout=replace(TINY_LAYOUT, block_size=16))
    assert (second.attachment.num_blocks, second.attachment.dropped_blocks) == (8, 3)
    assert second.do(opening(1, tokens(4))) == Opened(0, [BlockRef(1, 1), BlockRef(2, 1)])


def test_with_no_session_left_another_model_drops_the_cache() -> None:
    policy = tiny_policy(16)
    first = PolicySession(policy)
    _sealed(first, 1, tokens(3))
    policy.detach(first.epoch)
    second = PolicySession(policy, fingerprint=replace(FINGERPRINT, weights="finetuned"))
    assert second.attachment.dropped_blocks == 3
    assert second.do(opening(1, tokens(4))).num_cached_tokens == 0


def test_quarantined_blocks_keep_the_pool_from_being_carved_anew() -> None:
    policy = tiny_policy(16)
    first = PolicySession(policy)
    first.do(opening(1, tokens(1)))
    policy.detach(first.epoch, quarantine=True)
    with pytest.raises(ConfigurationError, match="in use"):
        PolicySession(policy, layout=replace(TINY_LAYOUT, block_size=16))
    policy.settle(first.epoch)
    PolicySession(policy, layout=replace(TINY_LAYOUT, block_size=16))


@pytest.mark.parametrize("pool_bytes", [0, 511, 1024, 1535])
def test_a_pool_without_room_for_a_block_is_an_error_that_names_both_sizes(pool_bytes: int) -> None:
    policy = CachePolicy(pool_bytes)
    with pytest.raises(ConfigurationError, match=f"^pool_size: {pool_bytes} bytes .* 512 bytes"):
        PolicySession(policy)
    assert policy.stats().pool.total_blocks == 0


def test_the_least_pool_serves_one_block() -> None:
    session = PolicySession(CachePolicy(1536))
    assert session.do(opening(1, tokens(1))) == Opened(0, [BlockRef(1, 1)])


# Superseding


def test_a_new_session_of_the_same_runner_ends_the_old_one_with_its_first_message() -> None:
    policy = tiny_policy(12)
    old = PolicySession(policy)
    _sealed(old, 1, tokens(2))
    old.do(Extend(1, 20))
    new = PolicySession(policy, supersedes=old)
    assert [session.state for session in policy.stats().sessions] == ["superseded", "attached"]
    with pytest.raises(ProtocolViolation, match="session 1 has ended"):
        old.do(Release(1))
    opened = new.do(opening(1, tokens(3)))
    assert opened == Opened(16, [BlockRef(1, 1), BlockRef(2, 1), BlockRef(4, 1)])
    assert [session.epoch for session in policy.stats().sessions] == [new.epoch]
    assert policy.stats().pool.leased_blocks == 1


def test_a_runner_that_attaches_a_thousand_times_has_two_sessions_at_most() -> None:
    policy = tiny_policy(12)
    session = PolicySession(policy)
    for _ in range(2000):
        session = PolicySession(policy, supersedes=session)
    assert len(policy.stats().sessions) == 2
    policy.detach(session.epoch)
    assert policy.stats().sessions == []


def test_a_session_superseded_before_its_first_message_ends_with_the_one_before_it() -> None:
    policy = tiny_policy(12)
    first = PolicySession(policy)
    first.do(opening(1, tokens(2)))
    second = PolicySession(policy, supersedes=first)
    third = PolicySession(policy, supersedes=second)
    third.send()
    assert [session.epoch for session in policy.stats().sessions] == [third.epoch]
    assert policy.stats().pool.free_blocks == 11


def test_the_end_of_a_runner_ends_the_session_it_was_about_to_replace() -> None:
    policy = tiny_policy(12)
    first = PolicySession(policy)
    first.do(opening(1, tokens(2)))
    second = PolicySession(policy, supersedes=first)
    policy.detach(second.epoch)
    assert policy.stats().sessions == []
    assert policy.stats().pool.free_blocks == 11


# The end of a session


def test_the_end_of_a_session_frees_what_it_leased_and_keeps_what_it_sealed() -> None:
    policy = tiny_policy(12)
    session = PolicySession(policy)
    _sealed(session, 1, tokens(2))
    session.do(opening(2, tokens(2, base=50)))
    session.send(Fork(2, 12, [3]), Extend(2, 13), Release(3))
    policy.detach(session.epoch)
    assert policy.check_integrity() == []
    pool = policy.stats().pool
    assert (pool.free_blocks, pool.cached_blocks) == (11, 2)
    policy.detach(session.epoch)


def test_a_dead_sessions_blocks_are_granted_anew_deepest_first_across_its_sequences() -> None:
    policy = tiny_policy(9)
    session = PolicySession(policy)
    _sealed(session, 1, tokens(3))  # blocks 1 2 3
    _sealed(session, 2, tokens(4, base=50))  # blocks 4 5 6 7
    policy.detach(session.epoch)
    heir = PolicySession(policy)
    opened = heir.do(Open(1, "tenant", tokens(6, base=200), 0, 48))
    assert [block.id for block in opened.blocks] == [8, 7, 3, 6, 2, 5]


def test_a_dead_sessions_blocks_are_granted_anew_after_all_that_was_cached_before() -> None:
    policy = tiny_policy(9)
    first, second = PolicySession(policy), PolicySession(policy)
    _sealed(first, 1, tokens(3))  # blocks 1 2 3
    _sealed(second, 1, tokens(4, base=50))  # blocks 4 5 6 7
    first.do(Release(1))
    first.idle()
    policy.detach(second.epoch)
    opened = first.do(Open(2, "tenant", tokens(5, base=200), 0, 40))
    assert [block.id for block in opened.blocks] == [8, 3, 2, 1, 7]


def test_a_dead_sessions_hold_does_not_outlive_it() -> None:
    policy = tiny_policy(8)
    session = PolicySession(policy)
    session.do(opening(1, tokens(3)))
    session.do(Release(1))
    policy.detach(session.epoch)
    assert policy.stats().pool.free_blocks == 7


def test_blocks_that_another_session_uses_survive() -> None:
    policy = tiny_policy(8)
    first, second = PolicySession(policy), PolicySession(policy)
    _sealed(first, 1, tokens(2))
    second.do(opening(1, tokens(2)))
    policy.detach(first.epoch)
    assert policy.stats().pool.sealed_blocks == 2
    second.do(Release(1))
    second.idle()
    assert policy.stats().pool.free_blocks == 7


def test_what_a_session_could_write_is_quarantined_until_its_device_work_has_ended() -> None:
    policy = tiny_policy(8)
    session = PolicySession(policy)
    _sealed(session, 1, tokens(2))
    session.do(opening(2, tokens(1, base=50)))
    session.do(opening(3, tokens(1, base=70)))
    session.do(Release(3))
    policy.detach(session.epoch, quarantine=True)
    assert policy.check_integrity() == []
    pool = policy.stats().pool
    assert (pool.quarantined_blocks, pool.free_blocks, pool.cached_blocks) == (2, 5, 2)
    assert [session.state for session in policy.stats().sessions] == ["quarantined"]
    with pytest.raises(ProtocolViolation):
        session.do(opening(4, tokens(1)))
    policy.detach(session.epoch)
    policy.settle(session.epoch)
    assert policy.check_integrity() == []
    assert policy.stats().pool.free_blocks == 7
    assert policy.stats().sessions == []
    policy.settle(session.epoch)


def test_a_session_that_was_to_be_superseded_is_quarantined_with_the_one_after_it() -> None:
    policy = tiny_policy(8)
    older = PolicySession(policy)
    older.do(opening(1, tokens(2)))
    newer = PolicySession(policy, supersedes=older)
    # Only the older one has something to quarantine.
    assert policy.detach(newer.epoch, quarantine=True) == [older.epoch]
    assert policy.stats().pool.quarantined_blocks == 2
    assert policy.detach(newer.epoch, quarantine=True) == []
    policy.settle(older.epoch)
    assert policy.stats().pool.free_blocks == 7
    assert policy.stats().sessions == []


def test_case_09_a_block_whose_writer_died_before_the_seal_is_never_a_hit() -> None:
    """Case 9, the policy's part: killed between write and seal."""
    policy = tiny_policy(8)
    session = PolicySession(policy)
    opened = session.do(opening(1, tokens(2)))
    session.do(Seal(1, tokens(1), opened.blocks[:1]))
    policy.detach(session.epoch)
    assert PolicySession(policy).do(opening(1, tokens(2))).num_cached_tokens == 8


def test_case_01_after_the_drain_every_block_is_free_and_nothing_is_referenced() -> None:
    """Case 1: pool accounting drifts."""
    policy = tiny_policy(16)
    sessions = [PolicySession(policy), PolicySession(policy)]
    for round_number in range(20):
        for session in sessions:
            session.do(opening(1, tokens(2.5, base=round_number % 3)))
            session.send(Fork(1, 18, [2, 3]), Extend(1, 19), Extend(2, 25), Extend(3, 19))
            pool = policy.stats().pool
            counted = pool.free_blocks + pool.leased_blocks + pool.sealed_blocks + pool.quarantined_blocks
            assert counted == pool.total_blocks - 1
            session.send(Release(1), Release(2), Release(3))
            session.idle()
    stats = policy.stats()
    assert stats.pool.free_blocks == stats.pool.total_blocks - 1
    assert (stats.usage.logical_blocks, stats.usage.physical_blocks, stats.usage.sequences) == (0, 0, 0)
