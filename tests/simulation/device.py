"""The pool's memory and the devices that read and write it.

Every slot holds the KV that was really written there. A step reads all its past when it begins and again when it ends,
as a real one may do at any time in between; what it writes is half written until then. So a block that is reused, let
go or renamed too early is seen at once, as a wrong read.
"""

from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from model_runner.sequence import Sequence
from model_runner.step import Sampled, Step
from pagekeeper.common.operations import BlockCopy, BlockRef
from tests.simulation.model import chain, continuations, likeliest, mix, origin
from tests.simulation.world import Violation


class Memory:
    """The blocks of one pool, shared by everybody who has it mapped."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks: list[list[int]] = [[-1] * block_size for _ in range(num_blocks)]
        self.num_flights = 0
        self.filled: set[BlockRef] = set()
        """Blocks that something was copied into, or begins to be."""


class Row(NamedTuple):
    """One entry of a step as it is laid out: the table is a copy, as the device has it."""

    sequence: Sequence
    table: list[int]
    first: int
    last: int


@dataclass(frozen=True)
class Inputs:
    """A step as it is laid out, all but the tokens."""

    rows: list[Row]
    copies: list[BlockCopy]
    sampled_rows: list[int]
    samples: list[Sequence]


class Device:
    """Lays out steps and launches them; one a runner.

    Args:
        name: of its runner.
        rounding: where two tokens are as likely as each other, decides; None: it is always the first.
    """

    def __init__(self, name: str, rounding: Random | None) -> None:
        self._name = name
        self._rounding = rounding
        self._memory: Memory | None = None

    def bind(self, memory: Memory) -> None:
        """Compute on this pool from the next step on."""
        self._memory = memory

    @staticmethod
    def prepare(step: Step) -> Inputs:
        """Lay a step out."""
        rows = [
            Row(s, [ref.id for ref in s.block_table.blocks], s.num_computed, s.num_computed + n)
            for s, n in step.entries
        ]
        sampled_rows, samples = step.samples()
        return Inputs(rows, step.copies, sampled_rows, samples)

    def launch(self, inputs: Inputs) -> "Flight":
        """Begin a step; its tokens are known now."""
        if self._memory is None:
            raise Violation(f"{self._name} launches a step without a pool")
        return Flight(self._memory, inputs, self._name, self._rounding)


class Flight:
    """A step that runs; `end` is called when it has run."""

    def __init__(self, memory: Memory, inputs: Inputs, runner: str, rounding: Random | None) -> None:
        self.memory = memory
        self.rows = inputs.rows
        self._inputs = inputs
        self._rounding = rounding
        memory.num_flights += 1
        self._name = f"{runner}, flight {memory.num_flights}"
        self._mark = mark = -1 - memory.num_flights
        """Stands in a slot that this step is writing."""
        self._token_ids = [row.sequence.token_ids[: row.last] for row in inputs.rows]
        self._past = [
            chain(origin(row.sequence.tenant), token_ids)
            for row, token_ids in zip(inputs.rows, self._token_ids, strict=True)
        ]
        self._copied = [memory.blocks[copy.source.id][: copy.num_tokens] for copy in inputs.copies]
        self._sampled: Sampled | None = None
        self._copy()
        for row, past in zip(inputs.rows, self._past, strict=True):
            self._check(row, past, row.first, "begins")
        for row in inputs.rows:
            self._write(row, [mark] * row.last)

    @property
    def ended(self) -> bool:
        """Whether it has run."""
        return self._sampled is not None

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended."""
        del timeout_s
        return self.ended

    def result(self) -> tuple[Sampled, float]:
        """What it brings, once it has ended; when, nobody asks."""
        if self._sampled is None:
            raise Violation(f"{self._name} has not ended")
        return self._sampled, 0.0

    def end(self) -> None:
        """Compute: from what lies in the pool comes what is written, and from that what is sampled."""
        blocks, size = self.memory.blocks, self.memory.block_size
        for copy, copied in zip(self._inputs.copies, self._copied, strict=True):
            if blocks[copy.source.id][: copy.num_tokens] != copied:
                raise Violation(f"{self._name}: {copy.source} changes while it is copied")
        last_values: list[int] = []
        for row, token_ids, past in zip(self.rows, self._token_ids, self._past, strict=True):
            for position in range(row.first, row.last):
                if blocks[row.table[position // size]][position % size] != self._mark:
                    raise Violation(f"{self._name}: somebody else writes {self._slot(row, position)}")
            before = row.first - 1
            value = blocks[row.table[before // size]][before % size] if row.first else origin(row.sequence.tenant)
            computed: list[int] = past[: row.first]
            for token_id in token_ids[row.first :]:
                value = mix(value, token_id)
                computed.append(value)
            self._write(row, computed)
            last_values.append(value)
        for row, past in zip(self.rows, self._past, strict=True):
            self._check(row, past, row.last, "ends")
        token_ids: list[int] = []
        found = {}
        for sample, (index, sequence) in enumerate(zip(self._inputs.sampled_rows, self._inputs.samples, strict=True)):
            value = last_values[index]
            if sequence.beams is not None:
                found[sample] = continuations(value, sequence.num_continuations)
                token_ids.append(0)
            else:
                ties = likeliest(value, sequence.sampling.seed, sequence.candidate)
                token_ids.append(self._rounding.choice(ties) if self._rounding else ties[0])
        self._sampled = Sampled(token_ids, continuations=found)

    def write_late(self) -> None:
        """Write after the process has died: nobody sees what was computed, but the pool does."""
        for copy, copied in zip(self._inputs.copies, self._copied, strict=True):
            self.memory.blocks[copy.destination.id][: copy.num_tokens] = copied
        for row in self.rows:
            self._write(row, [self._mark] * row.last)

    def _copy(self) -> None:
        sources = {copy.source.id for copy in self._inputs.copies}
        destinations = [copy.destination.id for copy in self._inputs.copies]
        if len(set(destinations)) < len(destinations) or not sources.isdisjoint(destinations):
            raise Violation(f"{self._name}: the order of its copies matters: {self._inputs.copies}")
        for copy, copied in zip(self._inputs.copies, self._copied, strict=True):
            rest = self.memory.block_size - copy.num_tokens
            self.memory.blocks[copy.destination.id][:] = copied + [self._mark] * rest
            self.memory.filled.add(copy.destination)

    def _write(self, row: Row, values: list[int]) -> None:
        blocks, size = self.memory.blocks, self.memory.block_size
        for position in range(row.first, row.last):
            blocks[row.table[position // size]][position % size] = values[position]

    def _check(self, row: Row, past: list[int], num_tokens: int, when: str) -> None:
        blocks, size = self.memory.blocks, self.memory.block_size
        for start in range(0, num_tokens, size):
            values = blocks[row.table[start // size]]
            wanted = past[start : min(start + size, num_tokens)]
            if values[: len(wanted)] != wanted:
                wrong = next(i for i, value in enumerate(wanted) if values[i] != value)
                raise Violation(f"{self._name}: wrong KV in {self._slot(row, start + wrong)} when it {when}")

    def _slot(self, row: Row, position: int) -> str:
        block = row.table[position // self.memory.block_size]
        return f"block {block}, position {position} of sequence {row.sequence.id}"
