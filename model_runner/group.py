"""Candidates of one request, opened and computed as one up to where they part."""

from collections.abc import Iterable
from itertools import takewhile

from model_runner.sequence import PendingFork, Sequence, Status


def gather(candidates: list[Sequence]) -> Sequence:
    """Choose the sequence that is opened for all of `candidates`, which nobody has opened; the others follow it.

    It is one of the shortest. So if some candidates end where all part, it is one of those whose next token is sampled
    from the logits of the last token in common.
    """
    leader, *others = sorted(candidates, key=lambda candidate: len(candidate.token_ids))
    for other in others:
        other.status = Status.FOLLOWING
    if others:
        common = _num_common_tokens(leader, others)
        # What any of them had computed of the common tokens was there for all.
        leader.was_computed = max(leader.was_computed, *(min(other.was_computed, common) for other in others))
        leader.fork = PendingFork(common, others)
    return leader


def _num_common_tokens(leader: Sequence, others: Iterable[Sequence]) -> int:
    columns = zip(leader.token_ids, *(other.token_ids for other in others), strict=False)
    return sum(1 for _ in takewhile(lambda column: column.count(column[0]) == len(column), columns))
