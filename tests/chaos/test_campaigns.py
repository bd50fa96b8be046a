"""Real processes, real signals: each kind of death and stop, and no client notices anything but a pause."""

import pytest

from bench.chaos.campaign import Campaign, Setting, run
from bench.chaos.faults import Plan, Signal
from tests.chaos.conftest import NUM_SLOTS

_WAIT_S = (0.1, 0.5)
_HOLD_S = (0.2, 2.0)
PROCESSES = ("runner", "gateway", "manager")
CAMPAIGNS = [
    Campaign(
        "every process killed and stopped",
        Plan(
            tuple((process, kind) for process in PROCESSES for kind in (Signal.KILL, Signal.STOP)), 6, _WAIT_S, _HOLD_S
        ),
        NUM_SLOTS,
    ),
    Campaign(
        "two runners killed and stopped",
        Plan((("runner", Signal.KILL), ("runner", Signal.STOP), ("standby", Signal.STOP)), 3, _WAIT_S, (1.0, 2.0)),
        NUM_SLOTS,
        standby=True,
    ),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("campaign", CAMPAIGNS, ids=lambda campaign: campaign.name.replace(" ", "-"))
def test_no_stream_loses_or_doubles_or_changes_a_token(campaign: Campaign, setting: Setting) -> None:
    report = run(campaign, setting, seed=1, tell=print)
    report.health = None  # how soon it tells is a matter of time, which is no matter of tests
    assert report.complaints() == []
    assert sum(report.faults.values()) == campaign.plan.count
