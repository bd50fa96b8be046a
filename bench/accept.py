"""`make accept`: every promise of the product, measured, as one table.

A promise that was not run, or whose measurement failed, is a failed row, and any failed row is a failed run.
"""

import argparse
import sys
import time

from rich.console import Console
from rich.table import Table

from bench.promise import Outcome, Promise, Workbench
from bench.promises import (
    cache,
    errors,
    gpu,
    greedy,
    leaks,
    policy,
    reliability,
    setup,
    sharing,
    simulation,
    speed,
    tested,
)
from pagekeeper.cli.demo_model import demo_model_path

PROMISES: list[Promise] = [
    *greedy.PROMISES,
    *cache.PROMISES,
    *sharing.PROMISES,
    *policy.PROMISES,
    *leaks.PROMISES,
    *speed.PROMISES,
    *errors.PROMISES,
    *reliability.PROMISES,
    *simulation.PROMISES,
    *tested.PROMISES,
    *gpu.PROMISES,
    *setup.PROMISES,
]


def main() -> None:
    """Measure and print; exit 1 unless every promise is kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORDS", help="leave out promises without these")
    only = parser.parse_args().only
    console = Console(width=None if sys.stdout.isatty() else 150)
    table = Table("promise", "figure", "bound", "result", title="What Pagekeeper promises")
    kept = 0
    with Workbench(demo_model_path()) as bench:
        for promise in PROMISES:
            if any(words in promise.name for words in only):
                outcome = attempt(promise, bench, console)
            else:
                outcome = Outcome("not run", "", False)
            kept += outcome.passed
            verdict = "[green]pass[/green]" if outcome.passed else "[red]fail[/red]"
            table.add_row(promise.name, outcome.figure, outcome.bound, verdict)
    console.print(table)
    console.print(f"{kept} of {len(PROMISES)} promises kept")
    sys.exit(kept != len(PROMISES))


def attempt(promise: Promise, bench: Workbench, console: Console) -> Outcome:
    """Measure one promise; whatever goes wrong is its outcome."""
    began = time.monotonic()
    try:
        outcome = promise.measure(bench)
    except Exception as error:  # noqa: BLE001 - one broken measurement must not hide the others
        outcome = Outcome(f"{type(error).__name__}: {error}", "to be measured", False)
    verdict = "pass" if outcome.passed else "FAIL"
    console.print(f"{verdict}  {promise.name}: {outcome.figure}  ({time.monotonic() - began:.0f} s)", highlight=False)
    return outcome


if __name__ == "__main__":
    main()
