"""`make bench`: total tokens per second, ours over gRPC against transformers' `generate`, turn by turn in one run.

The same weights, 128 random prompt tokens, 64 generated, end-of-sequence ignored, greedy. Absolute figures change with
the machine's other load; the ratio of two turns taken one after the other is what counts.
"""

import random
import statistics
import time
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from bench.promise import Request, Workbench, ask_all
from pagekeeper.cli.demo_model import demo_model_path
from pagekeeper.client import Sampling

INPUT_TOKENS, OUTPUT_TOKENS = 128, 64
BATCH_SIZES = (1, 8, 32)
_ROUNDS = 3


@dataclass(frozen=True)
class Comparison:
    """Total output tokens per second at one batch size, medians over the rounds."""

    batch_size: int
    ours: float
    theirs: float
    ratio: float
    """Median of the rounds' ratios."""


def compare(bench: Workbench, batch_size: int, rounds: int = _ROUNDS) -> Comparison:
    """Alternate between the two, after one turn each that does not count."""
    rng = random.Random(batch_size)
    ours, theirs = [], []
    for turn in range(rounds + 1):
        prompts = [rng.choices(range(100, 40_000), k=INPUT_TOKENS) for _ in range(batch_size)]
        tokens = batch_size * OUTPUT_TOKENS
        ours_s, theirs_s = _time_ours(bench, prompts), _time_theirs(bench, prompts)
        if turn:
            ours.append(tokens / ours_s)
            theirs.append(tokens / theirs_s)
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    return Comparison(batch_size, statistics.median(ours), statistics.median(theirs), statistics.median(ratios))


def _time_ours(bench: Workbench, prompts: list[list[int]]) -> float:
    sampling = Sampling(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    began = time.monotonic()
    results = ask_all(bench.server, [Request(prompt, sampling) for prompt in prompts])
    elapsed = time.monotonic() - began
    short = sum(len(result.candidates[0].token_ids) != OUTPUT_TOKENS for result in results)
    if short:
        raise RuntimeError(f"{short} answers have not {OUTPUT_TOKENS} tokens")
    return elapsed


def _time_theirs(bench: Workbench, prompts: list[list[int]]) -> float:
    bench.reference.prepare()
    began = time.monotonic()
    bench.reference.generate(prompts, OUTPUT_TOKENS)
    return time.monotonic() - began


def main() -> None:
    """Print the table."""
    table = Table(
        "concurrent requests", "Pagekeeper, tokens/s", "transformers, tokens/s", "ratio", title="128 in, 64 out, greedy"
    )
    with Workbench(demo_model_path()) as bench:
        for batch_size in BATCH_SIZES:
            row = compare(bench, batch_size)
            table.add_row(str(batch_size), f"{row.ours:.1f}", f"{row.theirs:.1f}", f"{row.ratio:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
