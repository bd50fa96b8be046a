"""Which runner serves which generation, decided without a runner, a loop or a clock that runs."""

import pytest

from gateway.finish_reason import FinishReason
from gateway.fleet import Role
from gateway.token_stream import Beam
from gateway.validation import Limits
from pagekeeper.common.errors import BugError, DuplicateRequestError, InvalidRequestError, UnavailableError
from tests.fakes.router import FakeLink, Rig, failure, taken

BOTH, PREFILL, DECODE = Role.BOTH, Role.PREFILL, Role.DECODE
LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


def test_output_of_an_older_attempt_is_void_on_any_link_and_a_gap_ends_the_request() -> None:
    first, second = FakeLink(), FakeLink()
    rig = Rig(first)
    generation = rig.submit()
    rig.join(second)
    rig.router.lose(first)
    for link, attempt in ((first, 1), (second, 1), (first, 2)):
        rig.make(link, generation, 8, attempt=attempt)
        rig.router.take_beams(link, generation.number, attempt, [Beam([8], 0.0)])
        rig.router.take_prompt_logprobs(link, generation.number, attempt, [])
        rig.router.refuse(link, generation.number, attempt, BugError("late"))
        rig.router.refuse(link, generation.number, attempt, None)
    assert (generation.token_ids[0], failure(generation)) == ([], None)
    rig.make(second, generation, 9, 10)
    rig.make(second, generation, 10, 11, position=1)
    assert generation.token_ids[0] == [9, 10, 11]
    rig.make(second, generation, 12, position=5)
    assert generation.token_ids[0] == [9, 10, 11]
    assert isinstance(failure(generation), BugError)
    assert second.cancels == [(generation.number, ())]


def test_a_runner_that_comes_back_mixes_no_older_attempt_into_the_one_it_has_now() -> None:
    old, new = FakeLink(), FakeLink()
    rig = Rig(old)
    generation = rig.submit()
    rig.make(old, generation, 8)
    rig.router.lose(old)
    rig.join(new)
    assert new.attempts == [(2, 100, {0: [8]})]
    rig.make(new, generation, 99, attempt=1, position=1)
    rig.make(old, generation, 99, attempt=1, position=1)
    rig.router.lose(old)
    rig.router.report(old, has_manager=False)
    rig.router.drain(old)
    rig.make(new, generation, 9)
    assert taken(generation) == [(0, [8, 9], None)]
    assert rig.router.is_serving


@pytest.mark.parametrize(
    ("links", "at_start", "behind_tokens"),
    [
        ([FakeLink(BOTH), FakeLink(PREFILL), FakeLink(DECODE)], 1, 2),
        ([FakeLink(BOTH), FakeLink(DECODE)], 0, 1),
        ([FakeLink(PREFILL), FakeLink(BOTH)], 0, 1),
        ([FakeLink(DECODE)], 0, 0),
        ([FakeLink(PREFILL)], 0, 0),
        ([FakeLink(is_standby=True), FakeLink()], 1, 1),
        ([FakeLink(is_standby=True)], 0, 0),
        ([FakeLink(DECODE), FakeLink(BOTH, is_standby=True)], 1, 0),
        ([FakeLink(PREFILL, is_standby=True), FakeLink(BOTH)], 1, 1),
    ],
)
def test_a_runner_that_is_meant_for_it_goes_first_and_a_standby_last(
    links: list[FakeLink], at_start: int, behind_tokens: int
) -> None:
    for resumed, chosen in ((None, at_start), ({0: [8]}, behind_tokens)):
        rig = Rig(*links)
        rig.submit(resumed=resumed)
        assert [len(link.attempts) for link in links] == [index == chosen for index in range(len(links))]
        for link in links:
            link.attempts.clear()


def test_among_equals_the_one_with_the_fewest_sequences_is_next() -> None:
    first, second = FakeLink(), FakeLink()
    rig = Rig(first, second)
    wide = rig.submit(n=4)
    narrow = [rig.submit() for _ in range(4)]
    assert (len(first.attempts), len(second.attempts)) == (1, 4)
    rig.router.cancel(wide)
    for _ in range(4):
        rig.make(second, narrow.pop(), 8, finish_reason=STOP)
    rig.submit(n=2)
    rig.submit()
    rig.submit()
    assert (len(first.attempts), len(second.attempts)) == (2, 6)


def test_a_runner_without_its_manager_is_the_last_choice_and_keeps_what_it_has() -> None:
    first, second = FakeLink(), FakeLink()
    rig = Rig(first, second)
    generation = rig.submit()
    rig.router.report(first, has_manager=False)
    rig.submit()
    rig.submit()
    assert (len(first.attempts), len(second.attempts)) == (1, 2)
    assert rig.router.is_serving
    rig.router.report(second, has_manager=False)
    assert not rig.router.is_serving
    rig.submit()
    assert (len(first.attempts), len(second.attempts)) == (2, 2)
    rig.make(first, generation, 8)
    assert taken(generation) == [(0, [8], None)]
    rig.router.report(first, has_manager=True)
    assert rig.router.is_serving


def test_what_drains_moves_at_once_and_that_is_no_loss() -> None:
    first, second = FakeLink(), FakeLink(is_standby=True)
    rig = Rig(first, second)
    generation = rig.submit()
    rig.make(first, generation, 8)
    rig.router.drain(first)
    assert first.cancels == [(generation.number, ())]
    assert second.attempts == [(2, 100, {0: [8]})]
    assert generation.losses_in_a_row == 0
    rig.make(first, generation, 9, attempt=1)
    assert generation.token_ids[0] == [8]
    rig.submit()
    assert len(second.attempts) == 2


def test_what_nobody_else_takes_ends_where_it_drains_or_moves_to_the_next_that_is_ready() -> None:
    first, second = FakeLink(), FakeLink()
    rig = Rig(first)
    ends, moves = rig.submit(), rig.submit()
    rig.router.drain(first)
    assert not rig.router.is_serving
    late = rig.submit()
    rig.make(first, ends, 8, finish_reason=STOP)
    rig.make(first, moves, 8)
    assert (first.cancels, rig.router.num_waiting) == ([], 1)
    rig.join(second)
    assert first.cancels == [(moves.number, ())]
    assert second.attempts == [(2, 100, {0: [8]}), (1, 100, {0: []})]
    assert taken(ends) == [(0, [8], STOP)]
    assert late.attempt == 1


def test_the_end_of_a_runner_that_drained_is_no_loss() -> None:
    rig = Rig()
    generation = rig.submit()
    for _ in range(20):
        link = FakeLink()
        rig.join(link)
        rig.router.drain(link)
        assert rig.router.lose(link) == 1
    assert (generation.losses_in_a_row, failure(generation)) == (0, None)


def test_a_refusal_for_draining_sends_the_request_elsewhere_and_moves_the_others_with_it() -> None:
    first, second = FakeLink(), FakeLink()
    rig = Rig(first)
    refused, others = rig.submit(), rig.submit()
    rig.router.refuse(first, refused.number, 1, None)
    assert (rig.router.num_waiting, first.cancels) == (1, [])
    rig.join(second)
    assert [attempt for attempt, _, _ in second.attempts] == [2, 2]
    assert first.cancels == [(others.number, ())]


def test_any_other_refusal_is_the_requests_end() -> None:
    link = FakeLink()
    rig = Rig(link)
    refused, other = rig.submit(), rig.submit()
    error = InvalidRequestError()
    rig.router.refuse(link, refused.number, 1, error)
    assert (failure(refused), failure(other)) == (error, None)
    rig.router.cancel(refused)
    assert link.cancels == []


def test_a_request_that_takes_every_runner_down_is_given_up_unless_it_makes_progress() -> None:
    rig = Rig()
    poison, healthy = rig.submit(), rig.submit()
    for loss in range(5):
        assert failure(poison) is None
        link = FakeLink()
        rig.join(link)
        if loss == 3:
            rig.make(link, healthy, 8)
        rig.router.lose(link)
    assert isinstance(failure(poison), BugError)
    assert (failure(healthy), healthy.losses_in_a_row) == (None, 2)


def test_a_request_that_no_message_can_hold_fails_alone() -> None:
    link = FakeLink()
    rig = Rig()
    link.error = ValueError("too much")
    wrong = rig.submit()
    rig.join(link)
    assert failure(wrong) is link.error
    link.error = None
    rig.submit()
    assert len(link.attempts) == 1


def test_a_request_waits_for_a_runner_only_so_long() -> None:
    rig = Rig()
    early = rig.submit()
    rig.after(30)
    late = rig.submit()
    rig.after(30)
    assert failure(early) is None
    rig.after(0.1)
    assert isinstance(failure(early), UnavailableError)
    assert failure(late) is None
    link = FakeLink()
    rig.join(link)
    rig.after(100)
    assert failure(late) is None
    assert len(link.attempts) == 1


def test_a_stream_whose_runner_has_no_manager_is_given_up_after_the_same_time() -> None:
    first, second = FakeLink(), FakeLink()
    rig = Rig(first)
    generation = rig.submit()
    rig.make(first, generation, 8)
    rig.router.report(first, has_manager=False)
    rig.after(0)
    rig.after(59)
    rig.router.report(first, has_manager=True)
    rig.after(2)
    rig.router.report(first, has_manager=False)
    rig.after(0)
    rig.after(40)
    # Another runner that has none does not begin the time again.
    rig.router.lose(first)
    rig.join(second)
    rig.router.report(second, has_manager=False)
    rig.after(19)
    assert failure(generation) is None
    rig.after(2)
    assert isinstance(failure(generation), UnavailableError)
    assert second.cancels == [(generation.number, ())]
    assert generation.token_ids[0] == [8]


def test_the_end_of_one_may_let_another_in_and_have_a_third_cancelled_while_all_are_placed() -> None:
    first, second = FakeLink(), FakeLink()
    rig = Rig(first)
    one, two = rig.submit(), rig.submit()
    one.losses_in_a_row = 4

    def let_in() -> None:
        rig.router.cancel(two)
        two.stream.fail(DuplicateRequestError("taken over"))
        rig.submit()

    one.stream.when_ended(let_in)
    rig.router.lose(first)
    assert isinstance(failure(one), BugError)
    rig.join(second)
    assert [attempt for attempt, _, _ in second.attempts] == [1]
    assert (first.cancels, second.cancels) == ([], [])


def test_the_limits_are_what_every_runner_can_take_and_grow_again_when_the_small_one_is_gone() -> None:
    small, big = FakeLink(context=64), FakeLink(context=512)
    rig = Rig()
    assert rig.router.limits is None
    rig.join(small, big)
    assert rig.router.limits == Limits(384, 64)
    rig.router.lose(small)
    assert rig.router.limits == Limits(384, 512)
    rig.router.lose(big)
    assert rig.router.limits == Limits(384, 512)


def test_an_answer_longer_than_a_runners_context_goes_on_at_one_that_has_room() -> None:
    small, big = FakeLink(context=8), FakeLink(context=512)
    rig = Rig(small)
    generation = rig.submit(max_tokens=10, n=2, resumed={1: [8]})
    assert small.attempts == [(1, 5, {0: [], 1: [8]})]
    rig.make(small, generation, 9, 9, 9, 9, candidate=1, finish_reason=LENGTH)
    rig.make(small, generation, 7, 7, 7, 7, candidate=0)
    assert rig.router.num_waiting == 0
    rig.make(small, generation, 7, candidate=0, finish_reason=LENGTH)
    assert taken(generation) == [(1, [9] * 4, None), (0, [7] * 5, None)]
    assert (rig.router.num_waiting, small.cancels) == (1, [])
    rig.join(big)
    assert big.attempts == [(2, 10, {0: [7] * 5, 1: [8] + [9] * 4})]
    rig.make(big, generation, 7, 7, 7, 7, 7, candidate=0, finish_reason=LENGTH)
    rig.make(big, generation, 9, candidate=1, finish_reason=STOP)
    assert taken(generation) == [(0, [7] * 5, LENGTH), (1, [9], STOP)]
    assert rig.router.lose(big) == 0


def test_what_fits_into_no_runner_waits_for_one_and_is_not_refused_by_another() -> None:
    small = FakeLink(context=8)
    rig = Rig(small)
    long = rig.submit(resumed={0: [8] * 5})
    short = rig.submit(resumed={0: [8] * 4})
    assert small.attempts == [(1, 5, {0: [8] * 4})]
    assert failure(short) is None
    rig.after(61)
    assert isinstance(failure(long), UnavailableError)


def test_an_answer_that_ends_earlier_than_any_limit_has_ended() -> None:
    link = FakeLink()
    rig = Rig(link)
    generation = rig.submit(max_tokens=10)
    rig.make(link, generation, 8, finish_reason=LENGTH)
    assert taken(generation) == [(0, [8], LENGTH)]
