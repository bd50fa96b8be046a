"""Candidates that fork off one prompt, and beams, in the scheduler's exact words."""

from model_runner.sequence import Status
from model_runner.step import BeamsOutput, Hypothesis, Output, Siblings
from pagekeeper.common.operations import Extend, Fork, Open, Release, Seal
from tests.fakes.stepped_scheduler import STOP, Runner, refs


def test_candidates_are_opened_and_computed_as_one_and_fork_with_their_prompts_last_token() -> None:
    runner = Runner()
    first, second, third = runner.add_candidates(10, [], [], [])
    _, operations, _ = runner.step()
    assert operations == [Open(first.id, "t", [1] * 10, 9, 32)]
    runner.answers.shared = {1: refs(2)[0], 2: refs(2)[0]}
    work, operations, outputs = runner.step()
    assert work == {1: 10}
    # Each asks for the next slot, though their block has room for it: only one of them may write there.
    assert operations == [Fork(1, 10, [2, 3]), Extend(1, 11), Extend(2, 11), Extend(3, 11)]
    assert outputs == [Output(candidate, 0, 5, None) for candidate in (first, second, third)]
    work, operations, _ = runner.step()
    assert work == {1: 1, 2: 1, 3: 1}
    assert [(copy.source.id, copy.destination.id) for copy in runner.copies] == [(2, 3), (2, 4)]
    assert [c.block_table.ids.tolist() for c in (first, second, third)] == [[1, 3], [1, 4], [1, 2]]
    assert operations == [Seal(c.id, [1] * 8, refs(1)) for c in (first, second, third)]
    assert [c.num_recomputed_tokens for c in (first, second, third)] == [0, 0, 0]


def test_a_prompt_longer_than_the_budget_forks_at_its_last_chunk() -> None:
    runner = Runner(max_batch_tokens=16)
    runner.add_candidates(40, [], [])
    runner.step()
    forks = []
    for computed in (16, 16, 8):
        work, operations, _ = runner.step()
        assert work == {1: computed}
        forks.append([o for o in operations if isinstance(o, Fork)])
    assert forks == [[], [], [Fork(1, 40, [2])]]


def test_what_is_in_flight_at_a_fork_is_the_childrens_too() -> None:
    runner = Runner()
    first, second = runner.add_candidates(8, [], [])
    runner.step()
    step = runner.scheduler.schedule()
    assert step.siblings == [Siblings(0, [second])]
    assert step.samples() == ([0, 0], [first, second])
    runner.scheduler.apply(runner.answers(runner.scheduler.plan()))
    assert (second.num_computed, second.num_launched) == (0, 8)
    runner.scheduler.advance(step)
    assert (second.num_computed, second.num_launched) == (8, 8)


def test_resumed_candidates_find_their_own_blocks_once_those_in_common_can_be_found() -> None:
    runner = Runner()
    a, b, c = runner.add_candidates(8, [5, 6, 7, 8], [5, 6], [5, 6, 7])
    runner.answers.cached = {a.id: 8, b.id: 9, c.id: 8}
    _, operations, _ = runner.step()
    assert operations == [Open(b.id, "t", [1] * 8 + [5, 6], 9, 32, reopen=True)]
    work, operations, outputs = runner.step(token=9)
    assert work == {b.id: 1}
    assert operations == [
        Open(a.id, "t", [1] * 8 + [5, 6, 7, 8], 11, 32, reopen=True),
        Open(c.id, "t", [1] * 8 + [5, 6, 7], 10, 32, reopen=True),
    ]
    assert outputs == [Output(b, 2, 9, None)]
    work, _, outputs = runner.step(token=4)
    assert work == {a.id: 4, b.id: 1, c.id: 3}
    assert outputs == [Output(b, 3, 4, None), Output(a, 4, 4, None), Output(c, 3, 4, None)]
    # What had been computed, if only for one of them, and was not found: less than a block each.
    assert [s.num_recomputed_tokens for s in (a, b, c)] == [3, 1, 2]
    assert [s.num_cached_tokens for s in (a, b, c)] == [8, 8, 8]


def test_resumed_candidates_wait_while_the_blocks_in_common_are_computed_once() -> None:
    runner = Runner(max_batch_tokens=16)
    a, b = runner.add_candidates(32, [5], [6])
    runner.step()
    opens = []
    for _ in range(3):
        _, operations, _ = runner.step()
        opens.append([o.sequence for o in operations if isinstance(o, Open)])
    assert opens == [[], [], [b.id]]
    assert a.num_computed == 33
    assert b.num_cached_tokens == 0  # by the cache it is a miss, whatever `a` has computed meanwhile


def test_who_waits_for_a_candidate_that_is_cancelled_is_opened_by_itself() -> None:
    runner = Runner(max_batch_tokens=8)
    a, b, c = runner.add_candidates(16, [5], [6], [7])
    runner.step()
    runner.scheduler.cancel(c.id)
    runner.scheduler.cancel(a.id)
    _, operations, _ = runner.step()
    assert operations == [Release(a.id, []), Open(b.id, "t", [1] * 16 + [6], 16, 8, reopen=True)]
    assert b.opens is None


def test_a_group_waits_until_all_of_it_may_run_and_is_not_overtaken() -> None:
    runner = Runner(max_sequences=4)
    lone = runner.add(4, max_tokens=3)
    runner.add(4)
    runner.step()
    group = runner.add_candidates(8, [], [], [])
    late = runner.add(4)
    _, operations, _ = runner.step()
    assert not any(isinstance(o, Open) for o in operations)
    while lone.status is not Status.ENDED:
        runner.step()
    _, operations, _ = runner.step()
    assert [o.sequence for o in operations if isinstance(o, Open)] == [group[0].id]
    _, operations, _ = runner.step()
    assert late.status is Status.WAITING  # the whole group counts from the start


def test_more_candidates_than_can_run_at_once_come_in_groups() -> None:
    runner = Runner(max_sequences=2)
    candidates = runner.add_candidates(8, [], [], [], max_tokens=2)
    _, operations, _ = runner.step()
    assert operations == [Open(1, "t", [1] * 8, 7, 32)]
    for _ in range(6):
        runner.step()
    assert {c.status for c in candidates} == {Status.ENDED}
    assert not runner.scheduler.has_work


def test_a_preempted_candidate_is_opened_alone_with_its_own_tokens() -> None:
    runner = Runner()
    first, second = runner.add_candidates(8, [], [])
    runner.step()
    runner.answers.short = {2}
    runner.step()
    assert second.status is Status.PREEMPTED
    runner.answers.short = set()
    _, operations, _ = runner.step()
    assert operations == [
        Seal(first.id, [1] * 8, refs(1)),
        Seal(second.id, [1] * 8, refs(1)),
        Release(second.id, []),
    ]
    _, operations, _ = runner.step()
    assert operations == [Open(second.id, "t", [1] * 8 + [5], 8, 32, reopen=True)]


def test_a_cancelled_follower_is_forgotten_and_a_cancelled_leader_succeeded() -> None:
    runner = Runner(max_batch_tokens=8)
    first, second, third = runner.add_candidates(12, [], [], [])
    runner.step()
    runner.step()
    runner.scheduler.cancel(third.id)
    runner.scheduler.cancel(first.id)
    _, operations, _ = runner.step()
    assert operations == [
        Seal(first.id, [1] * 8, refs(1)),
        Release(first.id, []),
        Open(second.id, "t", [1] * 12, 11, 8),
    ]
    runner.step()
    assert second.status is Status.RUNNING
    assert second.fork is None


def test_after_a_restart_candidates_share_again_what_they_have_in_common() -> None:
    runner = Runner()
    first, second, third = runner.add_candidates(8, [], [], [])
    runner.step()
    runner.step()
    runner.scheduler.cancel(third.id)
    runner.step()
    second.token_ids[-1] = 7
    runner.scheduler.restart()
    _, operations, _ = runner.step()
    assert operations == [Open(first.id, "t", [1] * 8 + [5, 5], 9, 32, reopen=True)]
    _, operations, _ = runner.step()
    assert operations == []
    _, operations, _ = runner.step()
    assert isinstance(operations[0], Seal)
    assert operations[1:] == [Open(second.id, "t", [1] * 8 + [5, 7], 9, 32, reopen=True)]


# -- beams

A, B, C, D, E = 11, 12, 13, 14, 15


def begun(max_tokens: int = 100, *, intermediate: bool = False) -> Runner:
    """Two beams: sequence 1 with A, the better one, and sequence 2 with B."""
    runner = Runner()
    runner.search(10, 2, max_tokens, intermediate=intermediate)
    runner.step()
    runner.answers.shared = {1: refs(2)[0]}
    runner.step(beams={1: [(A, -1.0), (B, -2.0), (C, -3.0), (D, -4.0)]})
    return runner


def test_beams_fork_off_the_prompt_in_a_message_of_their_own() -> None:
    runner = begun()
    assert runner.beam_operations == [
        Seal(1, [1] * 8, refs(1)),
        Fork(1, 10, [2]),
        Extend(1, 11),
        Extend(2, 11),
    ]
    work, operations, _ = runner.step(beams={1: [(A, -9.0)], 2: [(A, -9.0)]})
    assert work == {1: 1, 2: 1}
    assert [(copy.source.id, copy.destination.id) for copy in runner.copies] == [(2, 3)]
    assert operations == []  # nothing is asked for ahead


def test_a_beam_without_a_future_gives_its_sequence_to_a_fork_of_another() -> None:
    runner = begun()
    runner.step(beams={1: [(C, -9.0), (D, -9.5)], 2: [(D, -1.0), (E, -1.5)]})
    assert runner.beam_operations == [Release(1), Fork(2, 11, [1]), Extend(2, 12), Extend(1, 12)]
    first, second = runner.scheduler.running
    assert first.token_ids == [1] * 10 + [B, E]
    assert second.token_ids == [1] * 10 + [B, D]
    assert first.block_table.ids.tolist() == [1, 2]


def test_beams_that_all_go_on_where_they_are_say_nothing_within_a_block() -> None:
    runner = begun()
    runner.step(beams={1: [(C, -1.0)], 2: [(D, -1.0)]})
    assert runner.beam_operations == []
    work, _, _ = runner.step(beams={1: [(C, -1.0)], 2: [(D, -1.0)]})
    assert work == {1: 1, 2: 1}


def test_a_search_waits_for_a_beam_that_is_short_and_goes_on_with_all() -> None:
    runner = begun()
    for _ in range(5):
        runner.step(beams={1: [(C, -1.0)], 2: [(D, -1.0)]})
    runner.answers.short, runner.answers.releasing = {2}, 1
    runner.step(beams={1: [(C, -1.0)], 2: [(D, -1.0)]})
    assert runner.beam_operations == [
        Seal(1, [1, 1, A, C, C, C, C, C], refs(3)),
        Seal(2, [1, 1, B, D, D, D, D, D], refs(2)),
        Extend(1, 17),
        Extend(2, 17),
    ]
    work, operations, _ = runner.step(beams={1: [(C, -1.0)]})
    assert work == {1: 1}
    assert operations == [Extend(2, 17)]
    assert runner.beam_operations == []
    runner.answers.short = set()
    runner.step()
    work, _, _ = runner.step(beams={2: [(D, -1.0)]})
    assert work == {2: 1}
    work, _, _ = runner.step(beams={1: [(C, -1.0)], 2: [(D, -1.0)]})
    assert work == {1: 1, 2: 1}


def test_a_search_that_is_short_is_preempted_whole_and_starts_again_with_its_prompt() -> None:
    runner = begun()
    for _ in range(5):
        runner.step(beams={1: [(C, -1.0)], 2: [(D, -1.0)]})
    runner.answers.short = {1}
    runner.step(beams={1: [(C, -1.0)], 2: [(D, -1.0)]})
    runner.answers.short = set()
    _, operations, _ = runner.step()
    assert [o for o in operations if not isinstance(o, Seal)] == [
        Release(1, []),
        Release(2, []),
    ]
    _, operations, _ = runner.step()
    assert operations == [
        Open(1, "t", [1] * 10, 9, 32, reopen=True),
    ]
    assert runner.scheduler.num_preemptions == 2


def test_a_search_ends_with_all_its_answers_and_leaves_nothing() -> None:
    runner = begun(max_tokens=2)
    _, _, outputs = runner.step(beams={1: [(STOP, -1.0), (D, -3.0)], 2: [(C, -1.0), (E, -8.0)]})
    assert len(outputs) == 1
    assert isinstance(outputs[0], BeamsOutput)
    assert outputs[0].ended
    assert [(h.token_ids, h.score) for h in outputs[0].hypotheses] == [([A], -1.0), ([B, C], -1.5)]
    _, operations, _ = runner.step()
    assert operations == [Release(1, [1, 1, A]), Release(2, [1, 1, B])]
    assert not runner.scheduler.has_work


def test_intermediate_beams_are_told_after_every_step() -> None:
    runner = begun(intermediate=True)
    _, _, outputs = runner.step(beams={1: [(C, -3.0)], 2: [(D, -1.0)]})
    leader = runner.scheduler.running[0]
    hypotheses = [Hypothesis([B, D], -1.5, None), Hypothesis([A, C], -2.0, None)]
    assert outputs == [BeamsOutput(leader, hypotheses, ended=False)]


def test_a_cancelled_beam_takes_its_search_with_it() -> None:
    runner = begun()
    runner.scheduler.cancel(runner.scheduler.running[1].id)
    _, operations, _ = runner.step()
    assert [o.sequence for o in operations if isinstance(o, Release)] == [1, 2]
    assert not runner.scheduler.has_work


def test_nothing_is_drafted_while_a_search_runs() -> None:
    runner = Runner()
    assert runner.scheduler.can_draft
    runner.search(10, 2)
    runner.step()
    assert not runner.scheduler.can_draft
