"""What the next message to the cache manager says while a step runs: its operations, kind by kind in their order."""

from collections.abc import Iterable, Iterator

from model_runner import grants
from model_runner.roster import Roster
from model_runner.sequence import Sequence
from pagekeeper.common.operations import Extend, Fork, Open, Release, Seal


def seals(sequences: Iterable[Sequence], block_size: int) -> Iterator[Seal]:
    """The blocks that steps which have ended have filled."""
    for sequence in sequences:
        if sequence.num_computed // block_size > sequence.num_sealed_blocks:
            yield grants.seal(sequence, block_size)


def releases(roster: Roster, block_size: int) -> Iterator[Release]:
    """Whoever leaves gives everything back."""
    for sequence in roster.leave():
        yield grants.release(sequence, block_size)


def forks(roster: Roster) -> tuple[list[Fork], list[Sequence]]:
    """Candidates part where the running step reaches the last token that they have in common.

    Returns:
        The forks, and the sequences that begin to run with them.
    """
    found: list[Fork] = []
    begun: list[Sequence] = []
    for trunk in roster.trunks.copy():
        if trunk.num_launched == trunk.most_slots:
            children = roster.part(trunk)
            found.append(grants.fork(trunk, trunk.num_launched, children))
            begun += children
    return found, begun


def extends(roster: Roster, most_tokens: int) -> Iterator[Extend]:
    """Slots for what the next step is to compute, which is at most so many tokens."""
    for sequence in sorted(roster.running, key=lambda s: s.length_after_step - s.num_launched > 1):
        num_tokens = min(sequence.length_after_step - sequence.num_launched, most_tokens)
        if num_tokens <= 0 or sequence.ends_after_step:
            continue
        most_tokens -= num_tokens
        if sequence.num_launched + num_tokens > sequence.num_slots:
            wanted = min(sequence.num_launched + num_tokens, sequence.most_slots)
            if wanted > sequence.num_slots:
                yield Extend(sequence.id, wanted)


def let_follow(roster: Roster) -> None:
    """Whoever waits for blocks of another one is opened after the seals of these."""
    for guide in roster.guides.copy():
        if guide.opens is not None and guide.num_computed >= guide.opens.num_tokens:
            roster.let_follow(guide)


def opens(roster: Roster, room: int, most_tokens: int, *, is_short: bool, is_refused: bool) -> Iterator[Open]:
    """Begin as many of those who wait as may run and have something to do.

    Args:
        roster: who waits, and who runs.
        room: how many more may run.
        most_tokens: of a step.
        is_short: a sequence that runs was refused slots; nobody new is begun.
        is_refused: while the oldest Open is refused, the younger ones would be too.
    """
    if not roster.waiting:
        return
    prefill = sum(s.length_after_step - s.num_launched for s in roster.running)
    for sequence in roster.waiting:
        room -= 1 + sequence.num_following
        # An Open that was refused keeps its place among all runners only as long as it is tried again.
        too_much = is_short or prefill >= most_tokens
        if room < 0 or (too_much and not sequence.open_sent):
            return
        # What was computed once is most likely still in the cache.
        prefill += len(sequence.token_ids) - min(sequence.was_computed, len(sequence.token_ids) - 1)
        yield grants.opening(sequence, most_tokens)
        if is_refused:
            return


def withdrawals(roster: Roster, tried: Iterable[Open]) -> Iterator[Release]:
    """A refused Open that is not tried again would hold up every younger one, another runner's too."""
    sequences = {operation.sequence for operation in tried}
    for sequence in roster.waiting:
        if sequence.open_sent and sequence.id not in sequences:
            sequence.open_sent = False
            yield Release(sequence.id)
