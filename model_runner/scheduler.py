"""Which sequences run in the next step, and what the cache manager must be asked for it.

Policy only: plain data in, plain data out. A step works on what was granted before it was launched; what the step
after it needs is asked for while it runs, so the device never waits for an answer. The engine calls, once a step,

    schedule()  →  plan()  →  apply(results)  →  advance(step)  →  draft()  →  complete(sampled)

Until `complete` a placeholder stands for each token that the step samples, so the next step can be chosen, and its
batch laid out, while this one runs. What is drafted is scheduled unless a sequence in it has ended.

Continuous batching with chunked prefill under a token budget: sequences that need one token (decode) come first,
then prompts in order of priority and arrival. Under shortage the youngest running sequence gives way; it is opened
again later with everything it has, which is also how a runner starts over on an empty pool.

Candidates of one request are opened and computed as one sequence, and fork where its known tokens end; one that has
gone on alone is opened when what it has in common with the others can be found. The beams of a search fork as each
step's tokens tell, so after `complete` they have words of their own for the cache manager:

    complete(sampled)  →  plan_beams()  →  apply(results)  →  schedule()
"""

from collections.abc import Iterator
from dataclasses import dataclass

from model_runner import grants, planning
from model_runner.beam_group import BeamGroup
from model_runner.logprobs import TokenLogprobs
from model_runner.roster import Roster
from model_runner.sequence import FinishReason, Sequence, Status
from model_runner.step import BeamsOutput, Continuations, Output, Sampled, Scheduled, Siblings, Step
from pagekeeper.common.errors import BugError
from pagekeeper.common.ids import SequenceId
from pagekeeper.common.operations import (
    BlockCopy,
    Extend,
    Extended,
    Fork,
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
        self._roster = Roster(limits.block_size)
        self._planned: list[Operation] = []
        self._copies: list[BlockCopy] = []
        self._sampling: list[Sequence] = []
        self._forked_in_flight: list[Sequence] = []
        self._draft: Step | None = None
        self._short = False
        self._head_refused = False
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        """Something is left to compute or to tell the cache manager."""
        return bool(self._roster.by_id)

    @property
    def waiting(self) -> list[Sequence]:
        """Sequences that are to be opened, who is served first first."""
        return self._roster.waiting

    @property
    def running(self) -> list[Sequence]:
        """Sequences that have blocks and are computed, who is served first first."""
        return self._roster.running

    def add(self, *candidates: Sequence) -> None:
        """Take the candidates of a request, or the sequences of a beam search.

        They wait until the cache manager grants the Open of one of them. More candidates than can run at once are
        opened as several groups.
        """
        self._roster.add(candidates, self._limits.max_sequences)

    def cancel(self, sequence_id: SequenceId) -> None:
        """Drop a sequence between two steps, and with a beam its whole search; what they computed stays findable.

        Unknown ids are ignored.
        """
        sequence = self._roster.by_id.get(sequence_id)
        if sequence is None or sequence.status is Status.ENDED:
            return
        if sequence.beams is not None:
            self._end_search(sequence.beams)
        else:
            self._end(sequence)

    def cancel_all(self) -> None:
        """Drop every sequence between two steps."""
        for sequence_id in list(self._roster.by_id):
            self.cancel(sequence_id)

    @property
    def stalled(self) -> bool:
        """Nothing can run until another runner, or the end of a step, gives blocks back."""
        return self._short or self._head_refused

    @property
    def can_draft(self) -> bool:
        """What the next step computes depends on no token of this one. Beams depend on them."""
        return not self._roster.searches

    def schedule(self) -> Step:
        """This step's work: the draft, the very object, if it still holds; else chosen now."""
        draft, self._draft = self._draft, None
        return self._choose() if draft is None else draft

    def hold_back(self) -> Step:
        """This step's work if nothing is to be computed yet; not if there is a draft.

        The copies must be made all the same: their blocks are held only until this step is reported as ended.
        """
        copies, self._copies = self._copies, []
        return Step([], copies)

    def draft(self) -> Step:
        """What `schedule` will return if no sequence in it ends before; after `advance`. `complete` fills tokens in.

        Only if it `can_draft`.
        """
        self._draft = self._choose()
        return self._draft

    def _choose(self) -> Step:
        """Choose work from what is granted: single tokens first, then prompts, within the budget."""
        decodes: list[Scheduled] = []
        prefills: list[Scheduled] = []
        # Who has the most to catch up on comes last; the order among equals stays.
        budget = self._limits.max_batch_tokens
        behind: list[tuple[Sequence, int]] = []
        for sequence in self._roster.running:
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
        entries = decodes + prefills
        return Step(entries, copies, list(_siblings(entries)) if self._roster.trunks else [])

    def plan(self) -> list[Operation]:
        """What to tell the cache manager while the step runs: seals and releases, then slots for the next step."""
        roster, limits = self._roster, self._limits
        seals = list(planning.seals([*roster.running, *roster.leaving], limits.block_size))
        releases = list(planning.releases(roster, limits.block_size))
        forks, self._forked_in_flight = planning.forks(roster)
        extends = list(planning.extends(roster, limits.max_batch_tokens))
        planning.let_follow(roster)
        room = limits.max_sequences - roster.num_promised
        opens = list(
            planning.opens(
                roster,
                room,
                limits.max_batch_tokens,
                is_short=self._short,
                is_refused=self._short or self._head_refused,
            )
        )
        self._planned = [*seals, *releases, *planning.withdrawals(roster, opens), *forks, *extends, *opens]
        self._short = self._head_refused = False
        return self._planned

    def plan_beams(self) -> list[Operation]:
        """What to tell the cache manager before the next step is chosen, as it depends on it: how beams go on."""
        moved = [(group, move) for group in self._roster.searches if (move := group.move()) is not None]
        seals, releases, forks, extends = list[Seal](), list[Release](), list[Fork](), list[Extend]()
        for group, move in moved:
            goes_on = [beam for beam in group.beams if beam.status is Status.RUNNING and beam not in move.given_up]
            seals += planning.seals(goes_on, self._limits.block_size)
            releases += [grants.give_up(beam) for beam in move.given_up]
            for parent, children in move.forks:
                forks.append(grants.fork(parent, parent.num_computed, children))
                for child in children:
                    child.token_ids = parent.token_ids.copy()
            self._roster.move_beams(move.given_up, [child for _, children in move.forks for child in children])
            for beam, token_id in move.token_ids.items():
                beam.token_ids.append(token_id)
                if len(beam.token_ids) > beam.num_slots:
                    extends.append(Extend(beam.id, len(beam.token_ids)))
        self._planned = [*seals, *releases, *forks, *extends]
        return self._planned

    def apply(self, results: list[Result]) -> bool:
        """Take in the answers to the last plan. Returns whether the message let blocks go.

        Raises:
            BugError: an operation was refused as against the protocol.
        """
        lets_go = False
        for operation, result in zip(self._planned, results, strict=True):
            if isinstance(result, Refused):
                raise BugError(f"{operation} was refused: {result.reason}")
            if isinstance(operation, Release):
                lets_go = True
                continue
            sequence = self._roster.by_id.get(operation.parent if isinstance(operation, Fork) else operation.sequence)
            if sequence is None:
                continue
            match operation, result:
                case Seal(), Sealed(blocks) if sequence.status is Status.RUNNING:
                    lets_go |= sequence.block_table.rename(sequence.num_sealed_blocks - len(blocks), blocks)
                case Extend(), Extended(kept, _, copies):
                    lets_go |= bool(copies) or kept < len(sequence.block_table)
                    self._copies += grants.take_extended(sequence, result, self._limits.block_size)
                case Fork(children=children), _:
                    grants.take_forked(sequence, [self._roster.by_id[child] for child in children])
                case Open(), Opened():
                    self._copies += grants.take_opened(sequence, result, self._limits.block_size)
                    self._roster.run(sequence)
                case Open(), Shortage():
                    self._head_refused = True
                case Extend(), Shortage():
                    self._give_way(result)
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
                if sequence.beams is None:
                    sequence.token_ids.append(_PLACEHOLDER)
                self._sampling.append(sequence)
        for sequence in self._forked_in_flight:
            sequence.num_computed = sequence.num_launched
            sequence.num_in_flight = 0
            sequence.was_computed = max(sequence.was_computed, sequence.num_computed)
        self._forked_in_flight = []
        for _, siblings in step.siblings:
            for sequence in siblings:
                sequence.token_ids.append(_PLACEHOLDER)
            self._sampling += siblings

    def complete(self, sampled: Sampled) -> list[Output | BeamsOutput]:
        """Take in the end of the step."""
        sampling, self._sampling = self._sampling, []
        for prompt, position, found in sampled.prompts:
            prompt.take_in(position, found)
        if not sampled.logprobs and not sampled.continuations:
            return [self._take_in(sequence, token) for sequence, token in zip(sampling, sampled.token_ids, strict=True)]
        outputs: list[Output | BeamsOutput] = []
        for sample, (sequence, token) in enumerate(zip(sampling, sampled.token_ids, strict=True)):
            logprobs = sampled.logprobs.get(sample, [])
            if sequence.beams is not None:
                outputs += self._collect(sequence, sequence.beams, sampled.continuations[sample], logprobs)
                continue
            output = self._take_in(sequence, token)
            if logprobs and output.token_id is not None:
                output = output._replace(logprobs=logprobs[0])
            outputs.append(output)
        return outputs

    def restart(self) -> None:
        """Forget every grant: the pool is gone or the session is new, so every live sequence waits to be opened again.

        Call it between steps only. Sequences that had ended need no Release any more.
        """
        self._roster.restart()
        self._planned, self._copies, self._forked_in_flight = [], [], []
        self._draft = None
        self._short = self._head_refused = False

    # -- changes of state

    def _give_way(self, shortage: Shortage) -> None:
        """Preempt the youngest, unless blocks are on their way already."""
        if not self._short and shortage.releasing_blocks == 0:
            self.num_preemptions += self._roster.preempt_youngest()
        self._short = True

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

    def _collect(
        self, beam: Sequence, group: BeamGroup, continuations: Continuations, logprobs: list[TokenLogprobs]
    ) -> Iterator[BeamsOutput]:
        if beam.status is not Status.RUNNING or not group.collect(beam, continuations, logprobs):
            return
        if group.has_ended:
            self._end_search(group)
            yield BeamsOutput(group.leader, group.search.hypotheses, ended=True)
        elif group.search.params.intermediate:
            yield BeamsOutput(group.leader, group.search.running, ended=False)

    def _end_search(self, group: BeamGroup) -> None:
        for sequence in group.sequences:
            self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        if sequence.num_in_flight > 0 or sequence.status is Status.FOLLOWING:
            self._drop_draft()
        self._roster.end(sequence)

    def _drop_draft(self) -> None:
        if self._draft is not None:
            for sequence, _ in self._draft.entries:
                sequence.num_in_flight = 0
            # Nothing has been granted since it was drafted.
            self._copies = self._draft.copies
            self._draft = None


def _siblings(entries: list[Scheduled]) -> Iterator[Siblings]:
    """Who samples from the logits of the last token that a sequence and its followers have in common."""
    for row, entry in enumerate(entries):
        pending = entry.sequence.fork
        if pending is not None and entry.samples:
            yield Siblings(row, pending.children.copy())
