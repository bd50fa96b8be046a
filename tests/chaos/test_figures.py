"""Figures from records made by hand."""

import math
from dataclasses import replace

import pytest

from bench.chaos.faults import Fault, Signal
from bench.chaos.figures import (
    HealthAnswer,
    HealthFigures,
    Opens,
    Recomputed,
    Strike,
    health_figures,
    missed_tokens,
    pauses,
    recomputed,
)
from bench.chaos.streams import Expected, Stream

KILL = Fault("runner", Signal.KILL, 0.0, 0.0)


def strike(at: float, sure_before: float = math.inf, opens: Opens | None = None) -> Strike:
    return Strike(KILL, at, 1, sure_before, opens=opens)


def stream(began: float, *arrivals: float, ended: float | None = None, recomputed_tokens: int = 0) -> Stream:
    made = Stream(prompt=0, began=began)
    for position, arrival in enumerate(arrivals):
        made.take(arrival, position, [position], "x")
    if ended is not None:
        made.finish(ended, Expected(tuple(range(len(arrivals))), "x" * len(arrivals)), recomputed_tokens)
    return made


def test_a_pause_lasts_from_the_signal_to_the_streams_next_token() -> None:
    streams = [stream(0.0, 9.9, 10.7, 10.8), stream(5.0, 12.0)]
    assert pauses([strike(10.0)], streams) == pytest.approx([0.7, 2.0])


def test_tokens_that_were_on_their_way_end_no_pause() -> None:
    assert pauses([strike(10.0)], [stream(0.0, 9.9, 10.01, 10.1, 10.6, 10.7, 15.0)]) == pytest.approx([0.6])


def test_the_silence_after_the_next_fault_is_not_this_ones() -> None:
    assert pauses([strike(10.0), strike(11.0)], [stream(0.0, 9.9, 10.8, 10.9, 12.0, 12.1)]) == pytest.approx([0.8, 1.0])


def test_streams_that_began_later_or_ended_earlier_do_not_count() -> None:
    assert pauses([strike(10.0)], [stream(10.5, 11.0), stream(0.0, 9.0, ended=9.5)]) == []


def test_streams_that_may_have_been_with_another_runner_do_not_count() -> None:
    assert pauses([strike(10.0, sure_before=8.0)], [stream(7.0, 11.0), stream(9.0, 10.1)]) == pytest.approx([1.0])


def test_recomputed_tokens_are_held_against_a_block_for_each_hit() -> None:
    strikes = [strike(10.0), strike(20.0)]
    fine = stream(0.0, 1.0, 11.0, 21.0, ended=30.0, recomputed_tokens=32)
    too_many = stream(0.0, 1.0, 11.0, 21.0, ended=30.0, recomputed_tokens=33)
    assert recomputed(strikes, [fine], 16, [100]) == Recomputed(16.0, 0)
    assert recomputed(strikes, [fine, too_many], 16, [100]) == Recomputed(16.5, 1)


def test_a_stream_hit_before_its_first_token_may_compute_its_prompt_again() -> None:
    early = stream(0.0, 15.0, ended=30.0, recomputed_tokens=116)
    assert recomputed([strike(10.0)], [early], 16, [100]) == Recomputed(0.0, 0)
    early.recomputed_tokens += 1
    assert recomputed([strike(10.0)], [early], 16, [100]) == Recomputed(0.0, 1)


def test_streams_that_nothing_hit_do_not_count_as_recomputed() -> None:
    assert recomputed([strike(10.0)], [stream(11.0, 12.0, ended=13.0, recomputed_tokens=5)], 16, [9]).num_beyond == 0


def test_missed_tokens_are_counted_where_nobody_else_looked_anything_up() -> None:
    clean, mixed = Opens(0, 4, 20), Opens(1, 4, 500)
    assert missed_tokens([strike(1.0, opens=clean), strike(2.0, opens=mixed), strike(3.0)]) == 5.0
    assert missed_tokens([strike(2.0, opens=mixed)]) is None


def test_counters_grow_by_their_difference() -> None:
    prefix = {"lookups": 5, "reopens": 7, "queried_tokens": 100, "hit_tokens": 60}
    assert Opens.of(prefix) - Opens(4, 5, 10) == Opens(1, 2, 30)


def answers(*changes: tuple[float, bool], stand_in: bool = False) -> list[HealthAnswer]:
    """What the health service says, ten times a second, until 30; with a stand-in only of the runners."""
    states = [next(well for at, well in reversed(changes) if at <= tenth / 10) for tenth in range(300)]
    return [HealthAnswer(tenth / 10, stand_in or well, well) for tenth, well in enumerate(states)]


def health(told: list[HealthAnswer], *strikes: Strike) -> HealthFigures:
    return health_figures(strikes, told, 30.0, 0.1)


ALWAYS = answers((0.0, True))


def test_health_is_timed_from_the_fault() -> None:
    told = answers((0.0, True), (10.5, False), (14.0, True))
    assert health(told, strike(10.0)) == HealthFigures(1, pytest.approx(0.5), pytest.approx(4.0), 0)


@pytest.mark.parametrize("signal", [Signal.KILL, Signal.HANG])
def test_a_death_or_hang_that_is_told_late_or_never_is_late_however_short(signal: Signal) -> None:
    fault = replace(strike(10.0), fault=Fault("manager", signal, 0.0, 0.0), up_at=10.8)
    assert health(ALWAYS, fault).num_late == 1
    assert health(answers((0.0, True), (12.5, False), (14.0, True)), replace(fault, up_at=14.0)).num_late == 1
    assert health(answers((0.0, True), (10.3, False), (10.8, True)), fault).num_late == 0


@pytest.mark.parametrize(("hold_s", "num_late"), [(2.0, 0), (2.2, 1)])
def test_a_stop_has_to_be_told_if_it_lasts_longer_than_that_may_take(hold_s: float, num_late: int) -> None:
    stop = replace(strike(10.0), fault=Fault("runner", Signal.STOP, 0.0, hold_s), up_at=10.0 + hold_s)
    assert health(ALWAYS, stop).num_late == num_late
    assert health(answers((0.0, True), (11.8, False), (13.0, True)), stop).num_late == 0


def test_where_another_runner_goes_on_health_tells_of_the_runners() -> None:
    kill = replace(strike(10.0), has_stand_in=True, up_at=14.0)
    told = answers((0.0, True), (10.5, False), (14.0, True), stand_in=True)
    assert health(told, kill) == HealthFigures(1, pytest.approx(0.5), pytest.approx(4.0), 0)
    assert health(told, replace(kill, has_stand_in=False)).num_late == 1
    assert health(ALWAYS, kill).num_late == 1
    assert health(answers((0.0, True), (10.5, False), (14.0, True)), kill).num_needless == 1


def test_silence_tells_of_the_gateway_alone() -> None:
    silent = [HealthAnswer(a.at, None, None) if 10.5 < a.at < 11.5 else a for a in ALWAYS]
    assert health(silent, replace(strike(10.0), fault=Fault("gateway", Signal.KILL, 0.0, 0.0))).num_late == 0
    assert health(silent, strike(10.0)).num_late == 1


def test_a_server_that_was_not_well_before_a_fault_tells_nothing_of_it() -> None:
    assert health(answers((0.0, True), (9.5, False), (14.0, True)), strike(10.0)).num_told == 0


def test_what_health_says_once_all_is_up_is_about_something_else() -> None:
    told = answers((0.0, True), (15.0, False), (16.0, True))
    assert health(told, replace(strike(10.0), up_at=13.0)).num_told == 0


def test_each_fault_is_judged_until_the_next_one() -> None:
    told = answers((0.0, True), (10.5, False), (14.0, True), (21.0, False), (22.0, True))
    figures = health(told, strike(10.0), strike(20.0))
    assert figures == HealthFigures(2, pytest.approx(1.0), pytest.approx(4.0), 0)
