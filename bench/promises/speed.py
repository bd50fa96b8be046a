"""As fast as the library whose answers ours equal, at least."""

from bench.promise import Outcome, Promise, Workbench
from bench.throughput import BATCH_SIZES, compare


def keeps_up_with_transformers(bench: Workbench) -> Outcome:
    rows = [compare(bench, batch_size) for batch_size in BATCH_SIZES]
    figures = ", ".join(f"{row.ratio:.2f}x at {row.batch_size} ({row.ours:.0f}/s)" for row in rows)
    return Outcome(figures, ">= 1x at each", all(row.ratio >= 1 for row in rows))


PROMISES = [Promise("tokens/s of 1, 8 and 32 clients against transformers' generate", keeps_up_with_transformers)]
