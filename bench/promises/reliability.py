"""Nothing is lost when a process dies: the campaigns of `make chaos`, with few faults of each kind."""

from functools import partial

from bench.chaos import roles, suite
from bench.chaos.campaign import Campaign, Setting, run
from bench.chaos.faults import Plan, Signal
from bench.chaos.scoreboard import describe
from bench.chaos.workload import prompts
from bench.promise import Outcome, Promise, Workbench
from bench.promises import tested

_SEED = 6
_NUM_PROMPTS = 16


def setting(bench: Workbench) -> Setting:
    """The demo model, with as many prompts as streams at a time."""
    return Setting(bench.model, bench.reference, prompts(bench.model)[:_NUM_PROMPTS], "512MiB", {}, bench.folder)


def survives(campaign: Campaign, bench: Workbench) -> Outcome:
    report = run(campaign, setting(bench), _SEED, lambda _: None)
    complaints = report.complaints()
    bound = "" if campaign.pause_bound_s is None else f", median < {campaign.pause_bound_s:g} s"
    return Outcome(
        "; ".join([describe(report), *complaints]), f"nothing lost, doubled, changed or left{bound}", not complaints
    )


def moves_between_roles(bench: Workbench) -> Outcome:
    return roles.measure(setting(bench))


def promise(name: str, campaign: Campaign) -> Promise:
    """A campaign as a row."""
    return Promise(name, partial(survives, campaign))


_STOPS = tuple((process, Signal.STOP) for process in ("runner", "standby", "gateway", "manager"))

PROMISES = [
    promise("10 SIGKILLs of the runner with a standby, 16 streams", suite.takeover(10, num_slots=16)),
    promise("5 SIGKILLs of the runner with a standby, 1 stream", suite.takeover(5, num_slots=1)),
    promise("3 SIGKILLs of the only runner, 16 streams", suite.restart(3, num_slots=16)),
    promise("3 SIGKILLs of the only runner, 1 stream", suite.restart(3, num_slots=1)),
    promise("6 SIGKILLs of the gateway, 16 streams", suite.kills("gateway", 6)),
    promise("5 SIGKILLs of the cache manager, 16 streams", suite.kills("manager", 5)),
    promise("3 SIGSTOPs of each process, 16 streams", Campaign("each process stopped", Plan(_STOPS, 12), standby=True)),
    promise("each process hangs once: health says so within 2 s, and only it is replaced", suite.hangs(3)),
    Promise("512-token prompts move from a prefill to a decode runner", moves_between_roles),
    tested.promise("a process dies at each failpoint, and the streams go on", "tests/chaos/test_failpoints.py"),
]
