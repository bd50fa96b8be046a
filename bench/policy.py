"""`python -m bench.policy`: how many operations a second the cache manager's policy decides, on one core.

A runner without a model: it sends what the scheduler of a busy runner would send, and nothing is computed. Only the
time in `CachePolicy.apply` counts, as CPU time, so that neither the load generator nor a busy machine is measured.
"""

import argparse
import random
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cache_manager.prefix_cache import Fingerprint
from cache_manager.sessions import CachePolicy
from kernels.kv_layout import KvLayout
from pagekeeper.common.ids import SequenceId
from pagekeeper.common.operations import (
    BlockRef,
    Extend,
    Extended,
    Fork,
    Open,
    Opened,
    Operation,
    Release,
    Result,
    Seal,
    Sealed,
    StepMessage,
)

NUM_BLOCKS = 100_000
BLOCK_SIZE = 16
_LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, block_size=BLOCK_SIZE, head_dim=2, dtype="float16")
NUM_RUNNING = 256
"""Sequences that decode at the same time."""
_VOCABULARY = 50_000
_NUM_PREFIXES = 200
_PREFIX_TOKENS = 80
_PROMPT_TOKENS = 161
_ANSWER_TOKENS = 338
"""Prompts and answers are as long, on average, as those of ShareGPT, and a prefix as the shorter one that the
PagedAttention paper shares (arXiv 2309.06180)."""
_NUM_ANSWERS = [4, *[1] * 19]
"""One request in twenty samples four answers."""
_OPENS_A_STEP = 4
_NUM_CONVERSATIONS = 1000
"""That were served last: one request in four is the next turn of one, so it goes on from an answer's tail."""
_LONGEST_CONVERSATION = 1024
"""In tokens. Longer ones are not continued."""


@dataclass(frozen=True)
class Measurement:
    """What was decided, and how long that took.

    Attributes:
        operations: by name; a message, which reports the end of a step, counts as one too.
        seconds: CPU time in the policy.
        hit_rate: share of the opened sequences' tokens that came out of the cache.
        evictions: cached blocks that were granted anew.
    """

    operations: Counter[str]
    seconds: float
    hit_rate: float
    evictions: int

    @property
    def operations_per_second(self) -> float:
        """Decisions a second of one core."""
        return self.operations.total() / self.seconds


@dataclass(slots=True)
class _Sequence:
    token_ids: list[int]
    num_computed: int
    length: int
    """At which it ends."""
    table: list[BlockRef]
    num_sealed: int
    num_answers: int
    must_extend: bool = False
    """Its tail is shared, so the next token may need a copy of it."""


class _Runner:
    """One session with `NUM_RUNNING` sequences, which gain a token a step."""

    def __init__(self, policy: CachePolicy, rng: random.Random) -> None:
        self._policy = policy
        self._epoch = policy.attach("bench", 0, _LAYOUT, Fingerprint("bench", "bench", "float16"), now=0.0).epoch
        self._rng = rng
        self._prefixes = [self._tokens(_PREFIX_TOKENS) for _ in range(_NUM_PREFIXES)]
        self._conversations: deque[list[int]] = deque(maxlen=_NUM_CONVERSATIONS)
        self._running: dict[SequenceId, _Sequence] = {}
        self._waiting: dict[SequenceId, _Sequence] = {}
        self._last_name = 0
        self._step = 0
        self.seconds = 0.0
        self.operations: Counter[str] = Counter()

    def step(self) -> None:
        """Everybody gains a token; then the message about it, in the protocol's order."""
        self._step += 1
        for sequence in self._running.values():
            sequence.num_computed = len(sequence.token_ids)
            sequence.token_ids.append(self._rng.randrange(_VOCABULARY))
        operations: list[Operation] = [
            *self._seals(),
            *self._releases(),
            *self._forks(),
            *self._extends(),
            *self._opens(),
        ]
        message = StepMessage(self._step, self._step, self._step - 1, operations)
        began = time.thread_time()
        results = self._policy.apply(self._epoch, message)
        self.seconds += time.thread_time() - began
        self.operations["step report"] += 1
        for operation, result in zip(operations, results, strict=True):
            self.operations[type(operation).__name__.lower()] += 1
            self._take(operation, result)

    def _seals(self) -> Iterator[Seal]:
        for name, sequence in self._running.items():
            first, full = sequence.num_sealed, sequence.num_computed // BLOCK_SIZE
            if full > first:
                token_ids = sequence.token_ids[first * BLOCK_SIZE : full * BLOCK_SIZE]
                yield Seal(name, token_ids, sequence.table[first:full])

    def _releases(self) -> Iterator[Release]:
        for name in [name for name, sequence in self._running.items() if sequence.num_computed >= sequence.length]:
            sequence = self._running.pop(name)
            self._conversations.append(sequence.token_ids)
            yield Release(
                name, sequence.token_ids[sequence.num_computed // BLOCK_SIZE * BLOCK_SIZE : sequence.num_computed]
            )

    def _forks(self) -> Iterator[Fork]:
        for name, sequence in list(self._running.items()):
            if sequence.num_answers > 1:
                children = [self._new_name() for _ in range(sequence.num_answers - 1)]
                sequence.num_answers, sequence.must_extend = 1, True
                full = sequence.num_computed // BLOCK_SIZE
                self._running |= {
                    child: replace(
                        sequence,
                        token_ids=sequence.token_ids.copy(),
                        table=sequence.table.copy(),
                        num_sealed=full,
                        length=sequence.length + self._rng.randrange(_ANSWER_TOKENS),
                    )
                    for child in children
                }
                yield Fork(name, sequence.num_computed, children)

    def _extends(self) -> Iterator[Extend]:
        for name, sequence in self._running.items():
            if sequence.must_extend or len(sequence.token_ids) > len(sequence.table) * BLOCK_SIZE:
                sequence.must_extend = False
                yield Extend(name, len(sequence.token_ids))

    def _opens(self) -> Iterator[Open]:
        for _ in range(min(_OPENS_A_STEP, NUM_RUNNING - len(self._running))):
            own = self._tokens(self._rng.randrange(1, 2 * (_PROMPT_TOKENS - _PREFIX_TOKENS)))
            token_ids = self._prefix() + own
            length = len(token_ids) + self._rng.randrange(1, 2 * _ANSWER_TOKENS)
            name = self._new_name()
            self._waiting[name] = _Sequence(token_ids, 0, length, [], 0, self._rng.choice(_NUM_ANSWERS))
            yield Open(name, "bench", token_ids, len(token_ids) - 1, len(token_ids))

    def _take(self, operation: Operation, result: Result) -> None:
        match operation, result:
            case Open(name), Opened(num_cached, blocks):
                sequence = self._running[name] = self._waiting.pop(name)
                sequence.table, sequence.num_sealed = blocks, num_cached // BLOCK_SIZE
            case Seal(name), Sealed(blocks):
                if name in self._running:
                    sequence = self._running[name]
                    sequence.table[sequence.num_sealed : sequence.num_sealed + len(blocks)] = blocks
                    sequence.num_sealed += len(blocks)
            case Extend(name), Extended(kept, blocks, copies):
                table = self._running[name].table
                table[kept:] = blocks
                for copy in copies:
                    table[copy.index] = copy.destination

    def _prefix(self) -> list[int]:
        if self._conversations and self._rng.random() < 0.25:
            conversation = self._rng.choice(self._conversations)
            if len(conversation) < _LONGEST_CONVERSATION:
                return conversation
        return self._rng.choice(self._prefixes)

    def _tokens(self, count: int) -> list[int]:
        return self._rng.choices(range(_VOCABULARY), k=count)

    def _new_name(self) -> SequenceId:
        self._last_name += 1
        return SequenceId(self._last_name)


def measure(seconds: float) -> Measurement:
    """Fill the pool until every grant evicts something, then measure for so much CPU time of the policy."""
    policy = CachePolicy(NUM_BLOCKS * _LAYOUT.block_bytes)
    runner = _Runner(policy, random.Random(0))
    while (before := policy.stats().counters).evictions == 0:
        runner.step()
    runner.seconds = 0.0
    runner.operations.clear()
    while runner.seconds < seconds:
        runner.step()
    after = policy.stats().counters
    return Measurement(
        operations=runner.operations,
        seconds=runner.seconds,
        hit_rate=(after.hit_tokens - before.hit_tokens) / (after.queried_tokens - before.queried_tokens),
        evictions=after.evictions - before.evictions,
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="CPU time to measure for, after the pool is full")
    measured = measure(parser.parse_args().seconds)
    for name, count in measured.operations.most_common():
        print(f"{name:12} {count:9,}")
    print(f"{measured.hit_rate:.0%} of the opened tokens were cached, {measured.evictions:,} blocks were evicted")
    print(f"{measured.operations_per_second:,.0f} operations/s on {NUM_BLOCKS:,} blocks")


if __name__ == "__main__":
    main()
