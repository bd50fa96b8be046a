"""Who is at fault when nothing moves: the step, the cache manager, or nobody."""

from concurrent.futures import Future

import pytest

from model_runner.device import CpuFlight
from model_runner.report import Activity, EngineReport, EngineState


def report(state: EngineState, now: float) -> EngineReport:
    return state.report(
        now, running=1, waiting=2, step_seconds=3.0, manager_wait_seconds=0.5, preemptions=0, detached=False
    )


def in_step(future: Future[tuple[list[int], float]]) -> EngineState:
    return EngineState(since=10.0, step=7, limit_seconds=5.0, flight=CpuFlight(future))


def test_nothing_to_do_is_idle_however_long() -> None:
    idle = report(EngineState(since=10.0), now=1000.0)
    assert (idle.activity, idle.seconds, idle.hung) == (Activity.IDLE, 990.0, False)


def test_a_step_over_its_limit_is_hung() -> None:
    state = in_step(Future())
    assert report(state, now=14.0).activity is Activity.IN_STEP
    assert not report(state, now=14.0).hung
    assert report(state, now=15.1).hung


def test_a_missing_answer_is_the_managers_fault_once_the_step_has_ended() -> None:
    future: Future[tuple[list[int], float]] = Future()
    state = in_step(future).waiting(11.0)
    assert report(state, now=11.2).activity is Activity.IN_STEP
    future.set_result(([1], 11.3))
    waiting = report(state, now=11.4)
    assert waiting.activity is Activity.WAITING_FOR_MANAGER
    assert waiting.seconds == pytest.approx(0.4)
    assert not report(state, now=40.0).hung
    assert report(state.answered(), now=40.0).activity is Activity.IDLE


def test_a_manager_that_has_not_answered_for_long_is_named_while_a_step_runs_and_a_step_that_hangs_is_known() -> None:
    state = in_step(Future()).waiting(10.5)
    silent = report(state, now=12.0)
    assert (silent.activity, silent.seconds, silent.hung) == (Activity.WAITING_FOR_MANAGER, 1.5, False)
    assert report(state, now=15.1).hung
    answered = report(state.answered(), now=12.0)
    assert (answered.activity, answered.seconds, answered.limit_seconds) == (Activity.IN_STEP, 2.0, 5.0)
