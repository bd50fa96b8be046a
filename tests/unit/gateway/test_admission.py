"""Admission: who runs, who waits, who is refused."""

import pytest

from gateway.admission import Admission, Permit
from pagekeeper.common.errors import OverloadedError


class Door:
    """An admission that remembers who was granted a permit."""

    def __init__(self, max_concurrent: int, max_queue: int) -> None:
        self.admission = Admission(max_concurrent, max_queue)
        self.granted: list[str] = []

    def enter(self, name: str, priority: int = 0, instead_of: Permit | None = None, num_sequences: int = 1) -> Permit:
        permit = self.admission.permit(priority, lambda: self.granted.append(name), num_sequences)
        self.admission.enter(permit, instead_of)
        return permit


def test_permits_go_to_the_first_comers_and_then_by_arrival() -> None:
    door = Door(2, 5)
    first, *_ = [door.enter(name) for name in "abcd"]
    assert door.granted == ["a", "b"]
    door.admission.leave(first)
    assert door.granted == ["a", "b", "c"]
    assert (door.admission.running, door.admission.waiting) == (2, 1)


def test_a_lower_priority_number_is_served_earlier() -> None:
    door = Door(1, 5)
    running = door.enter("running")
    for name, priority in [("late", 1), ("first", -1), ("second", 0)]:
        door.enter(name, priority)
    door.admission.leave(running)
    assert door.granted[-1] == "first"


def test_excess_is_refused_at_once_and_told_when_to_come_back() -> None:
    door = Door(1, 1)
    door.enter("running")
    door.enter("waiting")
    with pytest.raises(OverloadedError) as refused:
        door.enter("too many")
    assert refused.value.retry_after_s > 0
    assert (door.admission.running, door.admission.waiting) == (1, 1)


def test_leaving_twice_gives_one_permit_back() -> None:
    door = Door(1, 5)
    running = door.enter("running")
    waiting = [door.enter(name) for name in "ab"]
    door.admission.leave(running)
    door.admission.leave(running)
    assert door.granted == ["running", "a"]
    door.admission.leave(waiting[0])
    door.admission.leave(waiting[1])
    assert (door.admission.running, door.admission.waiting) == (0, 0)


def test_whoever_leaves_the_queue_is_never_granted() -> None:
    door = Door(1, 5)
    running, leaves, _ = (door.enter(name) for name in ("running", "leaves", "stays"))
    door.admission.leave(leaves)
    door.admission.leave(running)
    assert door.granted == ["running", "stays"]


def test_without_a_queue_only_permits_count() -> None:
    door = Door(1, 0)
    running = door.enter("a")
    with pytest.raises(OverloadedError):
        door.enter("b")
    door.admission.leave(running)
    door.enter("c")
    assert door.granted == ["a", "c"]


def test_a_permit_handed_over_passes_the_queue_by() -> None:
    door = Door(1, 1)
    older = door.enter("older")
    waiting = door.enter("waiting")
    newer = door.enter("newer", instead_of=older)
    door.admission.leave(older)
    assert door.granted == ["older", "newer"]
    door.admission.leave(newer)
    assert door.granted == ["older", "newer", "waiting"]
    door.admission.leave(waiting)
    assert (door.admission.running, door.admission.waiting) == (0, 0)


def test_a_place_in_the_queue_handed_over_is_kept() -> None:
    door = Door(1, 2)
    running, older, _ = (door.enter(name) for name in ("running", "older", "second"))
    door.enter("newer", instead_of=older)
    door.admission.leave(older)
    door.admission.leave(running)
    assert door.granted == ["running", "newer"]


def test_what_has_been_given_back_is_handed_over_to_nobody() -> None:
    door = Door(1, 0)
    older = door.enter("older")
    door.admission.leave(older)
    door.enter("other")
    with pytest.raises(OverloadedError):
        door.enter("newer", instead_of=older)
    assert door.granted == ["older", "other"]


def test_a_permit_that_was_refused_can_be_left() -> None:
    door = Door(1, 0)
    door.enter("running")
    permit = door.admission.permit(0, lambda: None)
    with pytest.raises(OverloadedError):
        door.admission.enter(permit)
    door.admission.leave(permit)
    assert (door.admission.running, door.admission.waiting) == (1, 0)


def test_every_sequence_counts_and_nobody_overtakes_a_request_with_many() -> None:
    door = Door(4, 5)
    three = door.enter("three", num_sequences=3)
    two = door.enter("two", num_sequences=2)
    one = door.enter("one")
    assert door.granted == ["three"]
    door.admission.leave(three)
    assert door.granted == ["three", "two", "one"]
    door.admission.leave(two)
    door.admission.leave(one)
    assert (door.admission.running, door.admission.waiting) == (0, 0)


def test_whoever_waits_behind_a_request_with_many_goes_on_when_that_leaves() -> None:
    door = Door(4, 5)
    door.enter("three", num_sequences=3)
    two = door.enter("two", num_sequences=2)
    door.enter("one")
    door.admission.leave(two)
    assert door.granted == ["three", "one"]


def test_a_request_with_more_sequences_than_the_limit_runs_alone() -> None:
    door = Door(2, 5)
    many = door.enter("many", num_sequences=8)
    door.enter("one")
    assert door.granted == ["many"]
    door.admission.leave(many)
    assert door.granted == ["many", "one"]


def test_a_newer_stream_with_more_sequences_takes_the_place_of_its_older_one() -> None:
    door = Door(2, 5)
    older = door.enter("older")
    door.enter("other")
    door.enter("newer", num_sequences=2, instead_of=older)
    door.enter("late")
    assert door.granted == ["older", "other", "newer"]
    assert (door.admission.running, door.admission.waiting) == (2, 1)
