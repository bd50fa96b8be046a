"""Which sequences a runner has, by where they are in their lives."""

import bisect
from collections.abc import Iterable, Iterator
from operator import attrgetter

from model_runner import grants
from model_runner.beam_group import BeamGroup
from model_runner.group import gather
from model_runner.sequence import Sequence, Status
from pagekeeper.common.ids import SequenceId

_ORDER = attrgetter("order")


class Roster:
    """Moves sequences from one status to another. The lists are for others to read."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.by_id: dict[SequenceId, Sequence] = {}
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.leaving: list[Sequence] = []
        """Preempted or ended, with blocks that are to be released."""
        self.trunks: list[Sequence] = []
        """Those that run and have a fork before them."""
        self.guides: list[Sequence] = []
        """Those that run and compute what others wait for, to be opened by themselves."""
        self.searches: list[BeamGroup] = []
        """Those whose sequences run."""

    @property
    def num_promised(self) -> int:
        """Sequences that run, and those that will fork off them."""
        following = sum(trunk.num_following for trunk in self.trunks)
        return len(self.running) + following + sum(group.num_free for group in self.searches)

    def add(self, candidates: tuple[Sequence, ...], most_together: int) -> None:
        """Take the candidates of a request, `most_together` a group, or the sequences of a beam search."""
        self.by_id |= {candidate.id: candidate for candidate in candidates}
        if candidates[0].beams is not None:
            self._start_search(candidates[0].beams)
            return
        for first in range(0, len(candidates), most_together):
            group = list(candidates[first : first + most_together])
            if len(group) > 1:
                for candidate in group:
                    candidate.candidates = group
            self._gather(group)

    def run(self, sequence: Sequence) -> None:
        """The cache manager has opened it."""
        self.waiting.remove(sequence)
        self._run(sequence)
        if sequence.fork is not None:
            self.trunks.append(sequence)
        if sequence.opens is not None:
            self.guides.append(sequence)
        if sequence.beams is not None:
            self.searches.append(sequence.beams)

    def part(self, trunk: Sequence) -> list[Sequence]:
        """Let those who follow it run; returns them."""
        self.trunks.remove(trunk)
        pending, trunk.fork = trunk.fork, None
        children = [] if pending is None else pending.children
        for child in children:
            self._run(child)
        return children

    def let_follow(self, guide: Sequence) -> None:
        """What others need of it can be found: they wait to be opened."""
        self.guides.remove(guide)
        pending, guide.opens = guide.opens, None
        for sequence in [] if pending is None else pending.sequences:
            # It finds what was computed for all: no hit to speak of.
            if sequence.num_cached_tokens is None:
                sequence.num_cached_tokens = guide.num_cached_tokens
            self._wait(sequence)

    def move_beams(self, given_up: Iterable[Sequence], begun: Iterable[Sequence]) -> None:
        """Some sequences of a search have lost their beams; some, of these too, have got one."""
        for sequence in given_up:
            self.running.remove(sequence)
            sequence.status = Status.FOLLOWING
        for sequence in begun:
            self._run(sequence)

    def preempt_youngest(self) -> int:
        """Let the youngest running sequence give way, with a beam its whole search; returns how many those are."""
        youngest = self.running[-1]
        preempted = [youngest] if youngest.beams is None else youngest.beams.beams
        for sequence in preempted:
            self._stop_running(sequence)
            sequence.status = Status.PREEMPTED
            self.leaving.append(sequence)
            sequence.num_preemptions += 1
        return len(preempted)

    def leave(self) -> Iterator[Sequence]:
        """Those that leave, each to be released; what was preempted waits from then on."""
        leaving, self.leaving = self.leaving, []
        for sequence in leaving:
            yield sequence
            if sequence.status is Status.ENDED:
                del self.by_id[sequence.id]
            elif sequence.beams is None:
                self._wait(sequence)
            elif sequence is sequence.beams.beams[-1]:  # all of them were preempted together
                self._start_search(sequence.beams)

    def end(self, sequence: Sequence) -> None:
        """End it, wherever it is."""
        status, sequence.status = sequence.status, Status.ENDED
        if sequence in sequence.candidates:
            sequence.candidates.remove(sequence)
        if status is Status.WAITING:
            self.waiting.remove(sequence)
        elif status is Status.RUNNING:
            self._stop_running(sequence)
        elif status is Status.FOLLOWING:
            self._stop_following(sequence)
        if followers := _followers(sequence):
            # Another one is opened for those who followed; it finds what this one has computed.
            sequence.fork = sequence.opens = None
            self._gather(followers)
        if not sequence.open_sent:
            del self.by_id[sequence.id]
        elif status is not Status.PREEMPTED:
            self.leaving.append(sequence)

    def restart(self) -> None:
        """Forget every grant. What has not ended waits, the candidates of a request together again."""
        live = [sequence for sequence in self.by_id.values() if sequence.status is not Status.ENDED]
        self.by_id = {sequence.id: sequence for sequence in live}
        self.waiting, self.running, self.leaving = [], [], []
        self.trunks, self.guides, self.searches = [], [], []
        for sequence in live:
            grants.give_up(sequence)
            sequence.fork = sequence.opens = None
        for sequence in live:
            group = sequence.candidates or [sequence]
            if sequence.beams is not None and sequence is sequence.beams.leader:
                self._start_search(sequence.beams)
            elif sequence.beams is None and sequence is group[0]:
                self._gather(group)

    def _gather(self, group: list[Sequence]) -> None:
        for sequence in group:
            sequence.status = Status.FOLLOWING
        for sequence in gather(group, self._block_size):
            self._wait(sequence)

    def _wait(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        bisect.insort(self.waiting, sequence, key=_ORDER)

    def _run(self, sequence: Sequence) -> None:
        sequence.status = Status.RUNNING
        bisect.insort(self.running, sequence, key=_ORDER)

    def _start_search(self, group: BeamGroup) -> None:
        """Let the prompt wait to be opened; the beams fork off it."""
        group.restart()
        for sequence in group.sequences:
            sequence.status = Status.FOLLOWING
        self._wait(group.leader)

    def _stop_running(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        if sequence in self.trunks:
            self.trunks.remove(sequence)
        if sequence in self.guides:
            self.guides.remove(sequence)
        if sequence.beams in self.searches:
            self.searches.remove(sequence.beams)

    def _stop_following(self, sequence: Sequence) -> None:
        for leader in sequence.candidates:
            if leader.fork is not None and sequence in leader.fork.children:
                leader.fork.children.remove(sequence)
                if not leader.fork.children:
                    leader.fork = None
                    if leader in self.trunks:
                        self.trunks.remove(leader)
            elif leader.opens is not None and sequence in leader.opens.sequences:
                leader.opens.sequences.remove(sequence)


def _followers(sequence: Sequence) -> list[Sequence]:
    forking = [] if sequence.fork is None else sequence.fork.children
    opening = [] if sequence.opens is None else sequence.opens.sequences
    return forking + opening
