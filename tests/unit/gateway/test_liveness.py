"""When a runner counts as dead and a manager as missing: told by counts and reports, without a clock."""

import pytest

from gateway.liveness import PING_INTERVAL_S, Liveness, has_manager, is_hung
from pagekeeper.v1.runner_pb2 import EngineReport


def test_a_runner_is_lost_when_the_next_ping_is_due_and_a_second_and_a_half_of_them_are_unanswered() -> None:
    liveness = Liveness()
    intervals = 0
    while not liveness.is_lost:
        liveness.ping()
        intervals += 1
    assert intervals * PING_INTERVAL_S == 1.5


def test_an_answer_to_any_ping_begins_the_count_again() -> None:
    liveness = Liveness()
    for _ in range(20):
        for _ in range(5):
            liveness.ping()
            assert not liveness.is_lost
        liveness.pong()


def test_a_gateway_that_was_held_up_itself_blames_nobody() -> None:
    liveness = Liveness()
    liveness.ping()
    # Ten seconds pass in which nobody could be asked, and nobody's answer was read.
    assert not liveness.is_lost


@pytest.mark.parametrize(
    ("state", "seconds", "expected"),
    [
        (EngineReport.STATE_WAITING_FOR_MANAGER, 1.0, True),
        (EngineReport.STATE_WAITING_FOR_MANAGER, 1.01, False),
        (EngineReport.STATE_IDLE, 99.0, True),
        (EngineReport.STATE_IN_STEP, 99.0, True),
    ],
)
def test_a_manager_is_missing_when_the_engine_has_waited_for_it_for_a_second(
    state: int, seconds: float, expected: bool
) -> None:
    assert has_manager(EngineReport(state=state, seconds=seconds)) is expected
    assert not has_manager(EngineReport(state=state, seconds=seconds, detached=True))


@pytest.mark.parametrize(
    ("state", "seconds", "expected"),
    [
        (EngineReport.STATE_IN_STEP, 60.0, False),
        (EngineReport.STATE_IN_STEP, 60.1, True),
        (EngineReport.STATE_WAITING_FOR_MANAGER, 99.0, False),
        (EngineReport.STATE_IDLE, 99.0, False),
    ],
)
def test_an_engine_hangs_when_its_step_is_over_its_limit_and_never_for_its_manager(
    state: int, seconds: float, expected: bool
) -> None:
    assert is_hung(EngineReport(state=state, seconds=seconds, limit_seconds=60.0)) is expected
