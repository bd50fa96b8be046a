"""No simulated history of gateways, runners, cache manager and clients ends wrongly, whatever fails in it."""

import os
import re
import subprocess
import sys
from functools import partial

from bench.promise import Outcome, Promise, Workbench
from bench.promises import tested


def nothing_is_violated(_: Workbench, seeds: int) -> Outcome:
    command = [sys.executable, "-m", "tests.simulation", "--seeds", str(seeds), "--jobs", str(os.cpu_count() or 1)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    summary = re.search(r"(\d+) faults:.*\n(\d+) seeds, 0 violations, (\d+) seeds a minute", done.stdout)
    bound = f"{seeds} seeds, 0 violations"
    if summary is None or done.returncode:
        return Outcome("\n".join(done.stdout.splitlines()[-3:]), bound, False)
    faults, run, rate = map(int, summary.groups())
    figure = f"{run} seeds with {faults} faults, 0 violations, {rate} seeds a minute"
    return Outcome(figure, bound, run == seeds)


PROMISES = [
    Promise(
        "simulated deaths, stops, breaks and replacements lose, double and leave nothing",
        partial(nothing_is_violated, seeds=5000),
    ),
    tested.promise("the simulator finds each planted bug within 1,000 seeds", "tests/simulation/test_planted_bugs.py"),
]
