"""Faults come from a seed alone, and leave nobody out."""

from itertools import islice

import pytest

from bench.chaos.failpoints import visits
from bench.chaos.faults import Fault, Plan, Signal, draw
from bench.chaos.monkey import target
from bench.chaos.observer import Runner
from pagekeeper.common.failpoints import NAMES, Failpoints

PLAN = Plan(
    (("runner", Signal.KILL), ("gateway", Signal.STOP), ("manager", Signal.HANG)),
    7,
    wait_s=(1.0, 2.0),
    hold_s=(3.0, 4.0),
)


def drawn(seed: str, count: int = 60) -> list[Fault]:
    return list(islice(draw(PLAN, seed), count))


def test_the_same_seed_gives_the_same_faults() -> None:
    assert drawn("a") == drawn("a")
    assert drawn("a") != drawn("b")


def test_every_round_has_each_target_once() -> None:
    faults = drawn("a")
    for start in range(0, len(faults), 3):
        assert {(fault.process, fault.signal) for fault in faults[start : start + 3]} == set(PLAN.targets)


def test_rounds_differ_in_their_order() -> None:
    orders = {tuple(fault.process for fault in drawn("a")[start : start + 3]) for start in range(0, 60, 3)}
    assert len(orders) == 6


def test_times_are_within_their_bounds() -> None:
    for fault in drawn("a"):
        assert 1.0 <= fault.wait_s <= 2.0
        assert 3.0 <= fault.hold_s <= 4.0


@pytest.mark.parametrize(("process", "pid"), [("runner", 2), ("standby", 1), ("gateway", 3), ("manager", 4)])
def test_the_runner_that_is_hit_is_the_one_with_the_streams(process: str, pid: int) -> None:
    pids = {"runner": 1, "standby": 2, "gateway": 3, "manager": 4}
    runners = [Runner("standby", 2, 16, 0.0), Runner("0", 1, 0, 0.0)]
    assert target(process, pids, runners) == pid


def test_without_any_stream_the_runner_that_is_hit_is_no_standby() -> None:
    assert target("runner", {"standby": 2, "runner": 1}, []) == 1


def test_every_failpoint_is_visited_once_with_each_signal() -> None:
    planned = visits([Signal.KILL, Signal.STOP], "a")
    assert sorted((visit.name, visit.signal) for visit in planned) == sorted(
        (name, kind) for name in NAMES for kind in (Signal.KILL, Signal.STOP)
    )
    assert planned == visits([Signal.KILL, Signal.STOP], "a")
    for visit in planned:
        Failpoints(visit.failpoints)  # raises if it is not written as it must be
