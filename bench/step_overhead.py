"""Host work of a decode step, with a device and a cache manager that cost nothing.

    python -m bench.step_overhead

Between the end of a step and the launch of the next the device waits for `complete` and `tokens`, which takes what was
drafted and writes the new tokens into it. The rest runs while the device computes, unless a sequence ended: then the
device waits for `choose` and `lay out` as well. Medians in microseconds on one core; on a machine that is busy compare
rows of one run, not of two. Sequences marked with + have penalties for repetition and presence, over prompts of so
many distinct tokens, a bad word of two tokens and a bias.
"""

import dataclasses
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from model_runner.batch import lay_out, write_sampled_tokens
from model_runner.sampling_params import SamplingParams
from model_runner.scheduler import Scheduler, SchedulerLimits
from model_runner.sequence import Sequence
from model_runner.step import Sampled
from pagekeeper.common.ids import BlockId, SequenceId
from pagekeeper.common.operations import (
    BlockRef,
    Extend,
    Extended,
    Fork,
    Forked,
    Open,
    Opened,
    Operation,
    Release,
    Released,
    Result,
    Seal,
    Sealed,
)

BATCH_SIZES = (1, 8, 64, 256)
CONTEXTS = (1024, 8192)
CRITICAL = ("complete", "tokens")
DRAFT = ("choose", "lay out")
OVERLAPPED = ("plan", "apply", "advance")
_BLOCK_SIZE = 16
_STEPS = 200
_TOKEN = 5
_DISTINCT_TOKENS = 500
_PLAIN = SamplingParams(1.0, 0.9, 0, 0.0, 0, frozenset())
_ASKING = dataclasses.replace(
    _PLAIN, repetition_penalty=1.1, presence_penalty=0.5, bad_words=((_TOKEN, 7),), logit_bias={9: 1.0}
)


class GenerousManager:
    """Grants every wish; whole prompts but for their last token are found in the cache."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._lengths: dict[int, int] = {}

    def answer(self, operation: Operation) -> Result:
        """The result, as the protocol demands it."""
        match operation:
            case Open(sequence=sequence, token_ids=token_ids):
                return Opened(len(token_ids) - 1, self._grow(sequence, len(token_ids)))
            case Extend(sequence=sequence, num_tokens=num_tokens):
                return Extended(self._lengths[sequence], self._grow(sequence, num_tokens))
            case Seal(blocks=blocks):
                return Sealed(blocks)
            case Fork():
                return Forked()
            case Release():
                return Released()

    def _grow(self, sequence: int, num_tokens: int) -> list[BlockRef]:
        had = self._lengths.get(sequence, 0)
        self._lengths[sequence] = -(-num_tokens // _BLOCK_SIZE)
        return [BlockRef(BlockId(next(self._ids)), 1) for _ in range(self._lengths[sequence] - had)]


def measure(batch_size: int, context: int, steps: int = _STEPS, *, with_extras: bool = False) -> dict[str, float]:
    """Median microseconds of each part of a step in which `batch_size` sequences of about `context` tokens decode."""
    manager = GenerousManager()
    scheduler = Scheduler(SchedulerLimits(_BLOCK_SIZE, max_batch_tokens=2048, max_sequences=batch_size))
    for number in range(batch_size):
        # Their blocks do not all end at once.
        scheduler.add(_sequence(number, context - number % _BLOCK_SIZE, _ASKING if with_extras else _PLAIN))
    scheduler.apply([manager.answer(operation) for operation in scheduler.plan()])
    memory = np.empty(4 * batch_size * (context // _BLOCK_SIZE + steps), np.int64)

    def reserve(num_words: int) -> npt.NDArray[np.int64]:
        return memory[:num_words]

    times: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def timed(part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        times[part].append((time.perf_counter() - began) * 1e6)

    step = scheduler.schedule()
    inputs = lay_out(step, _BLOCK_SIZE, reserve)
    for _ in range(steps):
        with timed("plan"):
            operations = scheduler.plan()
        results = [manager.answer(operation) for operation in operations]
        with timed("apply"):
            scheduler.apply(results)
        with timed("advance"):
            scheduler.advance(step)
        with timed("choose"):
            draft = scheduler.draft()
        with timed("lay out"):
            inputs = lay_out(draft, _BLOCK_SIZE, reserve, padded_to=batch_size, look_for_sharing=True)
        with timed("complete"):
            scheduler.complete(Sampled([_TOKEN] * len(step.entries)))
        with timed("tokens"):
            step = scheduler.schedule()
            write_sampled_tokens(inputs, step)
        if step is not draft:
            raise RuntimeError("a draft was dropped: sequences must not end here")
    return {part: statistics.median(taken) for part, taken in times.items()}


def _sequence(number: int, num_tokens: int, sampling: SamplingParams) -> Sequence:
    num_distinct = _DISTINCT_TOKENS if sampling.wants_extras else 1
    return Sequence(
        id=SequenceId(number),
        tenant="bench",
        token_ids=[token % num_distinct for token in range(num_tokens)],
        num_prompt_tokens=num_tokens,
        max_total_tokens=num_tokens + 2 * _STEPS,
        sampling=sampling,
        was_computed=num_tokens - 1,
    )


def main() -> None:
    """Measure and print."""
    table = Table("sequences", "context", *CRITICAL, "waits", *DRAFT, "waits if one ended", *OVERLAPPED)
    plain = itertools.product(BATCH_SIZES, CONTEXTS, (False,))
    for batch_size, context, with_extras in (*plain, (64, 1024, True)):
        parts = measure(batch_size, context, with_extras=with_extras)
        waits = sum(parts[part] for part in CRITICAL)
        longest = waits + sum(parts[part] for part in DRAFT)
        values = [*(parts[part] for part in CRITICAL), waits, *(parts[part] for part in DRAFT), longest]
        values += [parts[part] for part in OVERLAPPED]
        table.add_row(f"{batch_size}{'+' * with_extras}", str(context), *(f"{value:.0f}" for value in values))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
