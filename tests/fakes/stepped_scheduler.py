"""A scheduler driven step by step, against answers made up by the tests."""

import itertools

from model_runner.beam_group import BeamGroup
from model_runner.beam_search import BeamSearch, BeamSearchParams, EarlyStopping
from model_runner.scheduler import Scheduler, SchedulerLimits
from model_runner.sequence import SamplingParams, Sequence
from model_runner.step import BeamsOutput, Continuations, Output, Sampled
from pagekeeper.common.ids import BlockId, SequenceId
from pagekeeper.common.operations import (
    BlockCopy,
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
    Shortage,
)

STOP = 99
SIZE = 8


def refs(*ids: int) -> list[BlockRef]:
    return [BlockRef(BlockId(i), 1) for i in ids]


class Answers:
    """Grants everything, with block ids that rise; `short` names sequences whose slots are refused.

    `shared` names sequences whose tail is to be copied before they write.
    """

    def __init__(self) -> None:
        self.ids = itertools.count(1)
        self.short: set[int] = set()
        self.shared: dict[int, BlockRef] = {}
        self.releasing = 0
        self.cached: dict[int, int] = {}
        self.tables: dict[int, int] = {}

    def __call__(self, operations: list[Operation]) -> list[Result]:
        return [self._answer(operation) for operation in operations]

    def _answer(self, operation: Operation) -> Result:
        match operation:
            case Open() | Extend() if operation.sequence in self.short:
                return Shortage(1, 0, self.releasing)
            case Open():
                cached = self.cached.get(operation.sequence, 0)
                self.tables[operation.sequence] = 0
                total = min(len(operation.token_ids), cached + operation.max_new_tokens)
                return Opened(cached, self._grow(operation.sequence, total))
            case Extend():
                kept = self.tables[operation.sequence]
                copies = []
                if tail := self.shared.pop(operation.sequence, None):
                    copies = [BlockCopy(kept - 1, tail, refs(next(self.ids))[0], operation.num_tokens - 1)]
                return Extended(kept, self._grow(operation.sequence, operation.num_tokens), copies)
            case Seal():
                return Sealed(operation.blocks)
            case Fork():
                self.tables |= dict.fromkeys(operation.children, self.tables[operation.parent])
                return Forked()
            case Release():
                return Released()

    def _grow(self, sequence: int, num_tokens: int) -> list[BlockRef]:
        needed = -(-num_tokens // SIZE)
        fresh = refs(*(next(self.ids) for _ in range(needed - self.tables[sequence])))
        self.tables[sequence] = needed
        return fresh


class Runner:
    """Drives a scheduler step by step; every sampled token is its position unless told otherwise."""

    def __init__(self, max_batch_tokens: int = 32, max_sequences: int = 8) -> None:
        self.scheduler = Scheduler(SchedulerLimits(SIZE, max_batch_tokens, max_sequences))
        self.answers = Answers()
        self.ids = itertools.count(1)
        self.copies: list[BlockCopy] = []
        self.beam_operations: list[Operation] = []

    def add(self, num_prompt: int, max_tokens: int = 100, priority: int = 0) -> Sequence:
        sequence = self._sequence(num_prompt, max_tokens, priority)
        self.scheduler.add(sequence)
        return sequence

    def add_candidates(self, num_prompt: int, *generated: list[int], max_tokens: int = 100) -> list[Sequence]:
        """A candidate for each of `generated`, the tokens it resumes with."""
        candidates = [self._sequence(num_prompt, max_tokens) for _ in generated]
        for index, (candidate, tokens) in enumerate(zip(candidates, generated, strict=True)):
            candidate.candidate = index
            candidate.token_ids = [1] * num_prompt + tokens
            candidate.num_resumed_tokens = len(tokens)
            candidate.was_computed = num_prompt + len(tokens) - 1 if tokens else 0
        self.scheduler.add(*candidates)
        return candidates

    def search(self, num_prompt: int, width: int, max_tokens: int = 100, *, intermediate: bool = False) -> BeamGroup:
        params = BeamSearchParams(width, 1.0, EarlyStopping.FALSE, width, intermediate)
        beams = [self._sequence(num_prompt, max_tokens) for _ in range(width)]
        group = BeamGroup(BeamSearch(params, frozenset({STOP}), max_tokens), beams)
        for beam in beams:
            beam.token_ids = [1] * num_prompt
            beam.beams, beam.num_continuations = group, group.search.num_continuations
        self.scheduler.add(*beams)
        return group

    def _sequence(self, num_prompt: int, max_tokens: int, priority: int = 0) -> Sequence:
        number = next(self.ids)
        return Sequence(
            id=SequenceId(number),
            tenant="t",
            token_ids=[number] * num_prompt,
            num_prompt_tokens=num_prompt,
            max_total_tokens=num_prompt + max_tokens,
            sampling=SamplingParams(0.0, 1.0, 0, 0.0, 0, frozenset({STOP})),
            priority=priority,
        )

    def step(
        self, token: int = 5, beams: dict[int, Continuations] | None = None
    ) -> tuple[dict[int, int], list[Operation], list[Output | BeamsOutput]]:
        """Returns tokens scheduled by sequence id, operations sent, outputs.

        Args:
            token: what every sequence samples.
            beams: how the beams go on, by sequence id.
        """
        step = self.scheduler.schedule()
        self.copies = step.copies
        operations = self.scheduler.plan()
        self.scheduler.apply(self.answers(operations))
        _, sampling = step.samples()
        self.scheduler.advance(step)
        continuations = {i: (beams or {})[s.id] for i, s in enumerate(sampling) if s.beams is not None}
        outputs = self.scheduler.complete(Sampled([token] * len(sampling), continuations=continuations))
        self.beam_operations = self.scheduler.plan_beams()
        self.scheduler.apply(self.answers(self.beam_operations))
        return {e.sequence.id: e.num_tokens for e in step.entries}, operations, outputs
