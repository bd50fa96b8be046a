"""The cache manager decides faster than any runner asks."""

from bench.policy import measure
from bench.promise import Outcome, Promise, Workbench

_BOUND = 50_000


def decides_fast(_: Workbench) -> Outcome:
    measured = measure(seconds=2.0)
    figure = f"{measured.operations_per_second:,.0f} a second, {measured.hit_rate:.0%} of the opened tokens cached"
    return Outcome(figure, f">= {_BOUND:,}", measured.operations_per_second >= _BOUND)


PROMISES = [Promise("operations of the cache's policy on 100,000 blocks, on one core", decides_fast)]
