"""Candidates of one request: what they have in common is computed once, and what is each one's own is found again."""

from collections.abc import Iterable
from itertools import takewhile

from model_runner.sequence import PendingFork, PendingOpens, Sequence


def gather(candidates: list[Sequence], block_size: int) -> list[Sequence]:
    """Choose which of `candidates`, which nobody has opened, are opened now; the others follow one of them.

    One of the shortest leads. Those that end where all part have nothing of their own: they fork off it there, and
    sample from the same logits. Whoever has gone on alone is opened alone, so that it finds its own blocks if there are
    any; but only once the whole blocks in common are sealed, or each of them would compute these as well.
    """
    leader, *others = sorted(candidates, key=lambda candidate: len(candidate.token_ids))
    if not others:
        return [leader]
    common = _num_common_tokens(leader, others)
    forking = [other for other in others if len(other.token_ids) == common]
    opening = [other for other in others if len(other.token_ids) > common]
    # What any of them had computed of the common tokens was there for all.
    leader.was_computed = max(leader.was_computed, *(min(other.was_computed, common) for other in others))
    if forking:
        leader.fork = PendingFork(common, forking)
    if common < block_size:
        return [leader, *opening]
    if opening:
        leader.opens = PendingOpens(common - common % block_size, opening)
    return [leader]


def _num_common_tokens(leader: Sequence, others: Iterable[Sequence]) -> int:
    columns = zip(leader.token_ids, *(other.token_ids for other in others), strict=False)
    return sum(1 for _ in takewhile(lambda column: column.count(column[0]) == len(column), columns))
