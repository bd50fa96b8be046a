"""Two runners at a tiny pool against a naive model; and bugs planted to see that they are caught."""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from cache_manager import prefix_cache, sequences
from cache_manager.block import Block, BlockState
from cache_manager.block_pool import BlockPool
from cache_manager.prefix_cache import PrefixCache, content_of
from cache_manager.sequences import Sequence, Sequences
from cache_manager.tickets import OpenTickets
from tests.property.pool_machine import PoolMachine

BOUNDS = settings(
    max_examples=80,
    stateful_step_count=100,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

PoolMachine.TestCase.settings = BOUNDS
TestPoolMachine = PoolMachine.TestCase


# The machine finds what it is there to find.


def _keep_the_index_entry_past_reuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixCache, "remove", lambda self, block: setattr(block, "hash", None))


def _free_at_once_what_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    let_go = BlockPool.let_go

    def let_go_and_settle(pool: BlockPool, block: Block) -> None:
        let_go(pool, block)
        pool.settle(block)
        block.holds += 1

    monkeypatch.setattr(BlockPool, "let_go", let_go_and_settle)


def _end_holds_a_step_early(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Sequences.begin
    monkeypatch.setattr(Sequences, "begin", lambda self, step, completed: begin(self, step, completed + 1))


def _write_a_shared_tail_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sequences, "_tail_needs_copy", lambda self, sequence: False)


def _forget_the_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "_tenant_field", lambda tenant: b"")


def _keep_the_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    grant = BlockPool.grant

    def grant_again(pool: BlockPool, depth: int) -> Block:
        block = grant(pool, depth)
        block.generation = 1
        return block

    monkeypatch.setattr(BlockPool, "grant", grant_again)


def _free_the_quarantined_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    end = Sequences.end
    monkeypatch.setattr(Sequences, "end", lambda self, quarantine: end(self, quarantine=False))


def _admit_younger_opens_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenTickets, "may_try", lambda self, epoch, sequence: True)


def _let_the_source_of_a_copy_be_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sequences, "_hold", lambda self, block: None)


def _take_the_last_block_for_a_source(monkeypatch: pytest.MonkeyPatch) -> None:
    partial_hit = Sequences._partial_hit
    monkeypatch.setattr(
        Sequences, "_partial_hit", lambda self, operation, hits, spare: partial_hit(self, operation, hits, spare=True)
    )


def _forget_the_tenant_of_a_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "tenant_root", lambda root, tenant: root)


def _believe_a_release_while_another_table_may_write(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep_tail(self: Sequences, sequence: Sequence, token_ids: list[int]) -> None:
        block = sequence.blocks[sequence.num_sealed]
        if block.state is BlockState.LEASED:
            parent = self._hash_before(sequence.tenant, sequence.blocks, sequence.num_sealed)
            block.content = content_of(parent, token_ids)

    monkeypatch.setattr(Sequences, "_keep_tail", keep_tail)


def _keep_the_tails_of_the_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    abandon = BlockPool.abandon

    def abandon_but_keep(
        pool: BlockPool, references: list[Block], holds: list[Block], *, quarantine: bool
    ) -> list[Block]:
        tails = {block: block.content for block in holds if block.state is BlockState.LEASED and block.content}
        quarantined = abandon(pool, references, holds, quarantine=quarantine)
        for block, content in tails.items():
            if block.state is BlockState.FREE:
                pool.free_queue.remove(block)
                pool.prefix_cache.add_tail(block, content)
                pool.free_queue.append(block)
        return quarantined

    monkeypatch.setattr(BlockPool, "abandon", abandon_but_keep)


@pytest.mark.parametrize(
    "plant",
    [
        _keep_the_index_entry_past_reuse,
        _free_at_once_what_is_let_go,
        _end_holds_a_step_early,
        _write_a_shared_tail_in_place,
        _forget_the_tenant,
        _keep_the_generation,
        _free_the_quarantined_at_once,
        _admit_younger_opens_first,
        _let_the_source_of_a_copy_be_granted,
        _take_the_last_block_for_a_source,
        _forget_the_tenant_of_a_tail,
        _believe_a_release_while_another_table_may_write,
        _keep_the_tails_of_the_dead,
    ],
)
def test_the_machine_catches_a_planted_bug(plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    hunt = settings(BOUNDS, max_examples=500, phases=[Phase.generate], database=None, derandomize=True)
    with pytest.MonkeyPatch.context() as monkeypatch:
        plant(monkeypatch)
        with pytest.raises(Exception):  # noqa: B017, PT011 (a broken pool breaks in many ways)
            run_state_machine_as_test(PoolMachine, settings=hunt)
