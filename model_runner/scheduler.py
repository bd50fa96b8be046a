"""Which sequences run in the next step, and what the cache manager must be asked for it.

Policy only: plain data in, plain data out. A step works on what was granted before it was launched; what the step
after it needs is asked for while it runs, so the device never waits for an answer. The engine calls, once a step,

    schedule()  →  plan()  →  apply(results)  →  advance(step)  →  draft()  →  complete(sampled)

Until `complete` a placeholder stands for each token that the step samples, so the next step can be chosen, and its
batch laid out, while this one runs. What is drafted is scheduled unless a sequence in it has ended.

Continuous batching with chunked prefill under a token budget: sequences that need one token (decode) come first,
then prompts in order of priority and arrival. Under shortage the youngest running sequence gives way; it is opened
again later with everything it has, which is also how a runner starts over on an empty pool.
"""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

from model_runner.block_table import BlockTable
from model_runner.sequence import FinishReason, Sequence, Status
from model_runner.step import Output, Sampled, Scheduled, Step
from pagekeeper.common.errors import BugError
from pagekeeper.common.ids import SequenceId
from pagekeeper.common.operations import (
    BlockCopy,
    Extend,
    Extended,
    Open,
    Opened,
    Operation,
    Refused,
    Release,
    Result,
    Seal,
    Sealed,
    Shortage,
)

_PlannedOperation = Seal | Release | Extend | Open

_ORDER = attrgetter("order")
_PLACEHOLDER = 0
"""A token id that is not known yet."""


@dataclass(frozen=True)
class SchedulerLimits:
    """What one step may hold."""

    block_size: int
    max_batch_tokens: int
    """Token budget of a step."""
    max_sequences: int
    """Most sequences that run at once."""


class Scheduler:
    """Waiting and running sequences of one runner."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._leaving: list[Sequence] = []
        self._planned: list[_PlannedOperation] = []
        self._copies: list[BlockCopy] = []
        self._sampling: list[Sequence] = []
        self._draft: Step | None = None
        self._sequences: dict[SequenceId, Sequence] = {}
        self._short = False
        self._head_refused = False
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        """Something is left to compute or to tell the cache manager."""
        return bool(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """Take a new sequence; it waits until the cache manager grants its Open."""
        self._sequences[sequence.id] = sequence
        bisect.insort(self.waiting, sequence, key=_ORDER)

    def cancel(self, sequence_id: SequenceId) -> None:
        """Drop a sequence between two steps; what it computed stays findable. Unknown ids are ignored."""
        sequence = self._sequences.get(sequence_id)
        if sequence is not None and sequence.status is not Status.ENDED:
            self._end(sequence)

    @property
    def stalled(self) -> bool:
        """Nothing can run until another runner, or the end of a step, gives blocks back."""
        return self._short or self._head_refused

    def schedule(self) -> Step:
        """This step's work: the draft, the very object, if it still holds; else chosen now."""
        draft, self._draft = self._draft, None
        return self._choose() if draft is None else draft

    def draft(self) -> Step:
        """What `schedule` will return if no sequence in it ends before; after `advance`. `complete` fills tokens in."""
        self._draft = self._choose()
        return self._draft

    def _choose(self) -> Step:
        """Choose work from what is granted: single tokens first, then prompts, within the budget."""
        decodes: list[Scheduled] = []
        prefills: list[Scheduled] = []
        # Who has the most to catch up on comes last; the order among equals stays.
        budget = self._limits.max_batch_tokens
        behind: list[tuple[Sequence, int]] = []
        for sequence in self.running:
            num_computed, num_known = sequence.num_computed, len(sequence.token_ids)
            if num_known >= sequence.max_total_tokens:
                continue  # in a draft: it ends when its last token is known
            num_tokens = min(num_known, sequence.num_slots) - num_computed
            if num_known - num_computed > 1:
                behind.append((sequence, num_tokens))
            elif num_tokens > 0 and budget > 0:
                decodes.append(Scheduled(sequence, 1))
                sequence.num_in_flight = 1
                budget -= 1
        for sequence, wanted in behind:
            num_tokens = min(wanted, budget)
            if num_tokens > 0:
                # A single token is a decode to the kernels, be it a prompt's last or all that the budget leaves.
                (decodes if num_tokens == 1 else prefills).append(Scheduled(sequence, num_tokens))
                sequence.num_in_flight = num_tokens
                budget -= num_tokens
        copies, self._copies = self._copies, []
        return Step(decodes + prefills, copies)

    def plan(self) -> list[Operation]:
        """What to tell the cache manager while the step runs: seals and releases, then slots for the next step."""
        seals, releases, extends = list(self._seals()), list(self._releases()), list(self._extends())
        opens = list(self._opens())
        self._planned = [*seals, *releases, *self._withdrawals(opens), *extends, *opens]
        return [*self._planned]

    def apply(self, results: list[Result]) -> bool:
        """Take in the answers to the last plan. Returns whether the message let blocks go.

        Raises:
            BugError: an operation was refused as against the protocol.
        """
        self._short = self._head_refused = lets_go = False
        for operation, result in zip(self._planned, results, strict=True):
            sequence = self._sequences.get(operation.sequence) if not isinstance(operation, Release) else None
            match operation, result:
                case _, Refused(reason):
                    raise BugError(f"{operation} was refused: {reason}")
                case Seal(), Sealed(blocks) if sequence is not None and sequence.status is Status.RUNNING:
                    lets_go |= sequence.block_table.rename(sequence.num_sealed_blocks - len(blocks), blocks)
                case Extend(), Extended(kept, blocks, copies) if sequence is not None:
                    lets_go |= bool(copies) or kept < len(sequence.block_table)
                    sequence.block_table.resize(kept, blocks)
                    self._rename(sequence, copies)
                    sequence.num_slots = len(sequence.block_table) * self._limits.block_size
                case Open(), Opened() if sequence is not None:
                    self._opened(sequence, result)
                case Open(), Shortage():
                    self._head_refused = True
                case Extend(), Shortage() if sequence is not None:
                    self._give_way(sequence, result)
                case Release(), _:
                    lets_go = True
        self._planned = []
        return lets_go

    def advance(self, step: Step) -> None:
        """Count the tokens of the running step as computed, and put placeholders where it samples.

        Call after `apply`: what is planned while a step runs does not rely on its end.
        """
        self._sampling = []
        for sequence, num_tokens in step.entries:
            first = sequence.num_computed
            last = sequence.num_computed = first + num_tokens
            sequence.num_in_flight = 0
            if sequence.was_computed > first:
                sequence.num_recomputed_tokens += min(sequence.was_computed, last) - first
            sequence.was_computed = max(sequence.was_computed, last)
            if last == len(sequence.token_ids):
                sequence.token_ids.append(_PLACEHOLDER)
                self._sampling.append(sequence)

    def complete(self, sampled: Sampled) -> list[Output]:
        """Take in the end of the step."""
        sampling, self._sampling = self._sampling, []
        outputs = [self._take_in(sequence, token) for sequence, token in zip(sampling, sampled.token_ids, strict=True)]
        for sample, logprobs in sampled.logprobs.items():
            if outputs[sample].token_id is not None:
                outputs[sample] = outputs[sample]._replace(logprobs=logprobs)
        return outputs

    def restart(self) -> None:
        """Forget every grant: the pool is gone or the session is new, so every live sequence waits to be opened again.

        Call it between steps only. Sequences that had ended need no Release any more.
        """
        for sequence in self._sequences.values():
            self._reset(sequence)
        self._sequences = {s.id: s for s in self._sequences.values() if s.status is not Status.ENDED}
        for sequence in self._sequences.values():
            sequence.status = Status.WAITING
        self.waiting = sorted(self._sequences.values(), key=_ORDER)
        self.running, self._leaving, self._planned, self._copies = [], [], [], []
        self._draft = None
        self._short = self._head_refused = False

    # -- what the next message says, in its order

    def _seals(self) -> Iterator[Seal]:
        size = self._limits.block_size
        for sequence in [*self.running, *self._leaving]:
            first, full = sequence.num_sealed_blocks, sequence.num_computed // size
            if full > first:
                sequence.num_sealed_blocks = full
                yield Seal(
                    sequence.id, sequence.token_ids[first * size : full * size], sequence.block_table.blocks[first:full]
                )

    def _releases(self) -> Iterator[Release]:
        for sequence in self._leaving:
            tail = sequence.num_sealed_blocks * self._limits.block_size
            yield Release(sequence.id, sequence.token_ids[tail : sequence.num_computed])
            self._reset(sequence)
            if sequence.status is Status.PREEMPTED:
                sequence.status = Status.WAITING
                bisect.insort(self.waiting, sequence, key=_ORDER)
            else:
                del self._sequences[sequence.id]
        self._leaving = []

    def _extends(self) -> Iterator[Extend]:
        budget = self._limits.max_batch_tokens
        for sequence in sorted(self.running, key=lambda s: s.length_after_step - s.num_launched > 1):
            num_tokens = min(sequence.length_after_step - sequence.num_launched, budget)
            if num_tokens <= 0 or sequence.ends_after_step:
                continue
            budget -= num_tokens
            if sequence.num_launched + num_tokens > sequence.num_slots:
                yield Extend(sequence.id, sequence.num_launched + num_tokens)

    def _opens(self) -> Iterator[Open]:
        room = max(0, self._limits.max_sequences - len(self.running))
        # While the oldest Open is refused, the younger ones would be too.
        candidates = self.waiting[: min(room, 1) if self._head_refused or self._short else room]
        prefill = sum(s.length_after_step - s.num_launched for s in self.running)
        for sequence in candidates:
            # An Open that was refused keeps its place among all runners only as long as it is tried again.
            if not sequence.open_sent and (self._short or prefill >= self._limits.max_batch_tokens):
                return
            # What was computed once is most likely still in the cache.
            prefill += len(sequence.token_ids) - min(sequence.was_computed, len(sequence.token_ids) - 1)
            sequence.open_sent = True
            yield Open(
                sequence.id,
                sequence.tenant,
                list(sequence.token_ids),
                max_cached_tokens=len(sequence.token_ids) - 1,
                max_new_tokens=self._limits.max_batch_tokens,
                reopen=sequence.was_computed > 0,
            )

    def _withdrawals(self, opens: list[Open]) -> Iterator[Release]:
        """A refused Open that is not tried again would hold up every younger one, another runner's too."""
        tried = {operation.sequence for operation in opens}
        for sequence in self.waiting:
            if sequence.open_sent and sequence.id not in tried:
                sequence.open_sent = False
                yield Release(sequence.id)

    # -- answers

    def _opened(self, sequence: Sequence, opened: Opened) -> None:
        self.waiting.remove(sequence)
        sequence.status = Status.RUNNING
        sequence.block_table = BlockTable(opened.blocks)
        self._rename(sequence, opened.copies)
        sequence.num_computed = opened.num_cached_tokens
        sequence.num_sealed_blocks = opened.num_cached_tokens // self._limits.block_size
        sequence.num_slots = len(opened.blocks) * self._limits.block_size
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = min(opened.num_cached_tokens, sequence.num_prompt_tokens)
        bisect.insort(self.running, sequence, key=_ORDER)

    def _rename(self, sequence: Sequence, copies: list[BlockCopy]) -> None:
        for copy in copies:
            sequence.block_table.rename(copy.index, [copy.destination])
        self._copies.extend(copies)

    def _give_way(self, sequence: Sequence, shortage: Shortage) -> None:
        """Preempt the youngest sequence, unless blocks are on their way already."""
        if not self._short and shortage.releasing_blocks == 0:
            self._preempt(self.running[-1])
        self._short = True

    # -- changes of state

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.status = Status.PREEMPTED
        self._leaving.append(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1

    def _take_in(self, sequence: Sequence, token_id: int) -> Output:
        position = sequence.num_generated_tokens - 1
        if token_id in sequence.sampling.stop_token_ids:
            sequence.token_ids.pop()
            self._end(sequence)
            return Output(sequence, position, None, FinishReason.STOP)
        sequence.token_ids[-1] = token_id
        if len(sequence.token_ids) < sequence.max_total_tokens:
            return Output(sequence, position, token_id, None)
        self._end(sequence)
        return Output(sequence, position, token_id, FinishReason.LENGTH)

    def _end(self, sequence: Sequence) -> None:
        if sequence.num_in_flight > 0:
            self._drop_draft()
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        elif sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        already_leaving = sequence.status is Status.PREEMPTED
        sequence.status = Status.ENDED
        if already_leaving:
            return
        if sequence.open_sent:
            self._leaving.append(sequence)
        else:
            del self._sequences[sequence.id]

    def _drop_draft(self) -> None:
        if self._draft is not None:
            for sequence, _ in self._draft.entries:
                sequence.num_in_flight = 0
            # Nothing has been granted since it was drafted.
            self._copies = self._draft.copies
            self._draft = None

    def _reset(self, sequence: Sequence) -> None:
        sequence.block_table = BlockTable()
        sequence.num_computed = sequence.num_in_flight = sequence.num_slots = sequence.num_sealed_blocks = 0
        sequence.open_sent = False
