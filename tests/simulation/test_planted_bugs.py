"""The simulator finds what it is there to find: each of these bugs, planted into the code under test."""

from collections.abc import Callable

import pytest

from cache_manager.block import Block
from cache_manager.prefix_cache import PrefixCache
from cache_manager.sequences import Sequence as CachedSequence
from cache_manager.sequences import Sequences
from cache_manager.sessions import CachePolicy
from gateway.router import Router
from model_runner import planning
from pagekeeper.common.ids import BlockHash, Epoch
from pagekeeper.common.operations import Operation
from tests.simulation.client import Client
from tests.simulation.engine import Engine
from tests.simulation.process import Waiting
from tests.simulation.run import run

MOST_SEEDS = 1000


def first_violation() -> str:
    """Of the first seed that goes wrong."""
    for seed in range(1, MOST_SEEDS + 1):
        report = run(seed)
        if report.violation is not None:
            return report.violation
    pytest.fail(f"{MOST_SEEDS} seeds find nothing wrong")


def keep_index_entries(plant: pytest.MonkeyPatch) -> None:
    remove = PrefixCache.remove

    def remove_all_but_the_entry(index: PrefixCache, block: Block) -> None:
        block_hash: BlockHash | None = block.hash
        remove(index, block)
        if block_hash is not None:
            index._blocks[block_hash] = block

    plant.setattr(PrefixCache, "remove", remove_all_but_the_entry)


def emit_before_the_seals_are_answered(plant: pytest.MonkeyPatch) -> None:
    talk = Engine._talk

    def emit_and_talk(engine: Engine, operations: list[Operation], *, in_flight: bool) -> Waiting[bool]:
        engine._emit()
        return talk(engine, operations, in_flight=in_flight)

    plant.setattr(Engine, "_talk", emit_and_talk)


def ignore_attempt_numbers(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Router, "_current", lambda router, link, number, attempt: router._places.get(number))


def free_what_a_step_still_reads(plant: pytest.MonkeyPatch) -> None:
    def let_go_at_once(sequences: Sequences, block: Block) -> None:
        sequences.pool.let_go(block)
        sequences.pool.settle(block)

    plant.setattr(Sequences, "_let_go", let_go_at_once)


def forget_a_lost_runners_last_tokens(plant: pytest.MonkeyPatch) -> None:
    lose = Router.lose

    def forget_and_lose(router: Router, link: object) -> int:
        for place in router._places.values():
            if place.runner is not None and place.runner.link is link:
                for token_ids in place.generation.token_ids.values():
                    del token_ids[-1:]
        return lose(router, link)

    plant.setattr(Router, "lose", forget_and_lose)


def resume_one_token_too_early(plant: pytest.MonkeyPatch) -> None:
    def all_but_the_last(client: Client) -> dict[int, list[int]]:
        return {index: answer.token_ids[:-1] for index, answer in client.answers.items()}

    plant.setattr(Client, "token_ids", property(all_but_the_last))


def write_into_shared_blocks(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Sequences, "_tail_needs_copy", lambda sequences, sequence: False)


def trust_device_work_to_die_with_its_process(plant: pytest.MonkeyPatch) -> None:
    detach = CachePolicy.detach

    def detach_at_once(policy: CachePolicy, epoch: Epoch, *, quarantine: bool = False) -> list[Epoch]:
        del quarantine
        return detach(policy, epoch)

    plant.setattr(CachePolicy, "detach", detach_at_once)


def leave_refused_opens_in_the_queue(plant: pytest.MonkeyPatch) -> None:
    """Whoever does not try again holds up everybody behind him."""
    plant.setattr(planning, "withdrawals", lambda roster, tried: iter(()))


def cut_tables_short(plant: pytest.MonkeyPatch) -> None:
    """Cut a fork's parent back by a block too many."""
    cut_back = Sequences._cut_back

    def cut_back_too_far(sequences: Sequences, sequence: CachedSequence, length: int) -> None:
        cut_back(sequences, sequence, max(1, length - 1))

    plant.setattr(Sequences, "_cut_back", cut_back_too_far)


@pytest.mark.parametrize(
    ("bug", "symptoms"),
    [
        (keep_index_entries, ("wrong KV", "damaged", "is counted as sealed")),
        (emit_before_the_seals_are_answered, ("before it has sealed",)),
        (ignore_attempt_numbers, ("which is over", "was to come")),
        (free_what_a_step_still_reads, ("wrong KV", "damaged")),
        (forget_a_lost_runners_last_tokens, ("was to come",)),
        (resume_one_token_too_early, ("follows",)),
        (write_into_shared_blocks, ("wrong KV", "somebody else writes")),
        (trust_device_work_to_die_with_its_process, ("wrong KV", "somebody else writes", "does not hold")),
        (leave_refused_opens_in_the_queue, ("without an answer", "keeps something")),
        (cut_tables_short, ("wrong KV", "somebody else writes")),
    ],
)
def test_a_planted_bug_is_found(
    bug: Callable[[pytest.MonkeyPatch], None], symptoms: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    violation = first_violation()
    assert any(symptom in violation for symptom in symptoms), violation
