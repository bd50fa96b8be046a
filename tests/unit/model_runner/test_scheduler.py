"""The scheduler's words, in exact order, against answers made up by the tests."""

import pytest

from model_runner.sequence import FinishReason, Status
from model_runner.step import Output
from pagekeeper.common.errors import BugError
from pagekeeper.common.operations import Extend, Open, Refused, Release, Seal, Sealed
from tests.fakes.stepped_scheduler import STOP, Runner, refs


def test_a_prompt_is_opened_computed_and_decoded() -> None:
    runner = Runner()
    sequence = runner.add(10)
    work, operations, _ = runner.step()
    assert work == {}
    assert operations == [Open(sequence.id, "t", [1] * 10, 9, 32)]
    work, operations, outputs = runner.step()
    assert work == {1: 10}
    assert operations == []  # the first decode's slot lies in the second block already
    assert [(o.position, o.token_id) for o in outputs] == [(0, 5)]
    work, operations, _ = runner.step()
    assert work == {1: 1}
    assert operations == [Seal(sequence.id, [1] * 8, refs(1))]


def test_slots_are_asked_for_one_step_ahead_and_only_at_a_block_edge() -> None:
    runner = Runner()
    sequence = runner.add(15)
    runner.step()
    _, operations, _ = runner.step()  # computes 15, the step after it writes slot 15
    assert operations == []
    _, operations, _ = runner.step()  # writes slot 15, the step after it writes slot 16
    assert operations == [Seal(sequence.id, [1] * 8, refs(1)), Extend(sequence.id, 17)]


def test_single_tokens_come_first_and_prompts_share_what_the_budget_leaves() -> None:
    runner = Runner(max_batch_tokens=16)
    runner.add(4)
    runner.step()
    runner.step()
    runner.add(20)
    runner.add(20)
    runner.step()
    work, _, _ = runner.step()
    assert work == {1: 1, 2: 15}
    work, _, _ = runner.step()
    assert work == {1: 1, 2: 5, 3: 10}  # the third was opened as soon as budget was in sight for it
    work, _, _ = runner.step()
    assert work == {1: 1, 2: 1, 3: 10}


def test_a_cached_prefix_is_not_computed() -> None:
    runner = Runner()
    sequence = runner.add(20)
    runner.answers.cached[1] = 16
    runner.step()
    work, _, _ = runner.step()
    assert work == {1: 4}
    assert sequence.num_cached_tokens == 16
    assert sequence.num_recomputed_tokens == 0


def test_a_stop_token_ends_the_sequence_and_is_not_part_of_it() -> None:
    runner = Runner()
    sequence = runner.add(4)
    runner.step()
    _, _, outputs = runner.step(token=STOP)
    assert outputs == [Output(sequence, 0, None, FinishReason.STOP)]
    _, operations, _ = runner.step()
    assert operations == [Release(sequence.id, [1] * 4)]
    assert not runner.scheduler.has_work


def test_the_last_token_carries_the_reason_and_no_slot_is_asked_for_after_it() -> None:
    runner = Runner()
    sequence = runner.add(16, max_tokens=1)
    runner.step()
    work, operations, outputs = runner.step()
    assert work == {1: 16}
    assert operations == []
    assert outputs == [Output(sequence, 0, 5, FinishReason.LENGTH)]
    _, operations, _ = runner.step()
    assert operations == [Seal(sequence.id, [1] * 16, refs(1, 2)), Release(sequence.id, [])]


def test_priority_goes_before_arrival() -> None:
    runner = Runner(max_sequences=1)
    runner.add(4, priority=1)
    urgent = runner.add(4, priority=0)
    _, operations, _ = runner.step()
    assert [o.sequence for o in operations] == [urgent.id]


def test_the_youngest_gives_way_and_is_opened_again_with_its_tokens() -> None:
    runner = Runner()
    old, young = runner.add(8), runner.add(8)
    runner.step()
    runner.answers.short = {1}
    work, operations, _ = runner.step()
    assert work == {1: 8, 2: 8}
    assert operations == [Extend(old.id, 9), Extend(young.id, 9)]
    assert young.status is Status.PREEMPTED
    runner.answers.releasing = 2
    work, operations, _ = runner.step()
    assert work == {}  # the old one has no slot yet
    assert operations[:4] == [
        Seal(old.id, [1] * 8, refs(1)),
        Seal(young.id, [2] * 8, refs(2)),
        Release(young.id, []),
        Extend(old.id, 9),
    ]
    assert young.status is Status.WAITING
    assert old.status is Status.RUNNING  # blocks are on their way: nobody else gives way
    runner.answers.short = set()
    runner.step()
    work, operations, _ = runner.step()
    assert work == {1: 1}
    assert [type(o) for o in operations] == [Open]
    assert operations[0] == Open(young.id, "t", [2] * 8 + [5], 8, 32, reopen=True)
    runner.step()
    assert young.num_recomputed_tokens == 8
    assert runner.scheduler.num_preemptions == 1


def test_a_short_sequence_with_nobody_younger_releases_itself() -> None:
    runner = Runner()
    alone = runner.add(8)
    runner.step()
    runner.answers.short = {1}
    runner.step()
    _, operations, _ = runner.step()
    assert operations == [Seal(alone.id, [1] * 8, refs(1)), Release(alone.id, [])]
    assert alone.status is Status.WAITING


def test_a_refused_open_is_tried_alone_and_the_others_are_withdrawn() -> None:
    runner = Runner()
    runner.add(8)
    runner.add(8)
    runner.answers.short = {1, 2}
    _, operations, _ = runner.step()
    assert [(type(o), o.sequence) for o in operations] == [(Open, 1), (Open, 2)]
    _, operations, _ = runner.step()
    assert [(type(o), o.sequence) for o in operations] == [(Release, 2), (Open, 1)]
    assert runner.scheduler.stalled
    urgent = runner.add(8, priority=-1)
    _, operations, _ = runner.step()
    assert [(type(o), o.sequence) for o in operations] == [(Release, 1), (Open, urgent.id)]


def test_a_cancelled_sequence_is_released_wherever_it_was() -> None:
    runner = Runner(max_sequences=1)
    running, waiting = runner.add(8), runner.add(8)
    runner.step()
    runner.scheduler.cancel(waiting.id)
    runner.step()
    runner.scheduler.cancel(running.id)
    runner.scheduler.cancel(running.id)
    _, operations, _ = runner.step()
    assert operations == [Seal(running.id, [1] * 8, refs(1)), Release(running.id, [])]
    assert not runner.scheduler.has_work


def test_a_folded_block_is_renamed_in_the_table() -> None:
    runner = Runner()
    sequence = runner.add(10)
    runner.step()
    runner.step()
    runner.scheduler.schedule()
    operations = runner.scheduler.plan()
    assert operations == [Seal(sequence.id, [1] * 8, refs(1))]
    assert runner.scheduler.apply([Sealed(refs(40))])
    assert sequence.block_table.blocks == refs(40, 2)
    assert sequence.block_table.ids.tolist() == [40, 2]


def test_a_restart_opens_every_live_sequence_again() -> None:
    runner = Runner()
    ended, live = runner.add(8, max_tokens=1), runner.add(8)
    runner.step()
    runner.step()
    assert ended.status is Status.ENDED
    runner.scheduler.restart()
    _, operations, _ = runner.step()
    assert operations == [Open(live.id, "t", [2] * 8 + [5], 8, 32, reopen=True)]


def test_a_refused_operation_is_a_bug() -> None:
    runner = Runner()
    runner.add(8)
    runner.scheduler.schedule()
    operations = runner.scheduler.plan()
    with pytest.raises(BugError, match="stale"):
        runner.scheduler.apply([Refused("stale")] * len(operations))
