"""What there is in one cache, and every question about it. What may be done with it is in `sessions`."""

from collections.abc import Container, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum

from cache_manager.block import Block, BlockState
from cache_manager.block_pool import BlockPool
from cache_manager.integrity import check_blocks, check_counts, check_free_queue, check_sessions
from cache_manager.sequences import Sequence, Sequences
from cache_manager.stats import CacheStats, Counters, PoolStats, SessionDetails, SessionStats, UsageStats
from kernels.kv_layout import KvLayout
from pagekeeper.common.ids import Epoch, SequenceId

SLICE_BLOCKS = 2048
"""Blocks or block-table entries that are looked at in one go, which takes a few milliseconds."""


class SessionState(Enum):
    """What a session may still do."""

    ATTACHED = "attached"
    SUPERSEDED = "superseded"
    """The same runner has attached again; the session keeps its blocks until the new one's first message."""
    QUARANTINED = "quarantined"
    """Ended, but its device work may still write the blocks that it had leased."""


@dataclass
class Session:
    """One runner's attachment: what it has, and how far its messages have come."""

    epoch: Epoch
    runner_id: str
    pid: int
    attached_at: float
    sequences: Sequences
    supersedes: Epoch | None
    state: SessionState = SessionState.ATTACHED
    last_number: int = 0
    last_step: int = 0
    completed_step: int = 0
    quarantined: list[Block] = field(default_factory=list)

    def stats(self) -> SessionStats:
        """What everybody is told of it."""
        return SessionStats(self.epoch, self.runner_id, self.pid, self.state.value, self.attached_at)


class CacheState:
    """The pool and the sessions that share it; nothing here changes anything.

    What grows with the pool is answered slice by slice. A slice is of one moment, and valid until the next message is
    applied, which may be before the next slice.
    """

    def __init__(self) -> None:
        self._layout: KvLayout | None = None
        self._counters = Counters()
        self._pool = BlockPool(0, self._counters)
        self._sessions: dict[Epoch, Session] = {}

    def stats(self) -> CacheStats:
        """What `GetStats` reports, in O(sequences)."""
        in_state = self._pool.num_in_state
        pool = PoolStats(
            total_blocks=len(self._pool.blocks) + 1 if self._layout else 0,
            free_blocks=in_state[BlockState.FREE],
            cached_blocks=self._pool.free_queue.num_cached,
            leased_blocks=in_state[BlockState.LEASED],
            sealed_blocks=in_state[BlockState.SEALED],
            quarantined_blocks=in_state[BlockState.QUARANTINED],
            block_size=self._layout.block_size if self._layout else 0,
            block_bytes=self._layout.block_bytes if self._layout else 0,
        )
        sessions = [session.stats() for session in self._sessions.values()]
        return CacheStats(pool, self._usage(pool.block_size), replace(self._counters), sessions)

    def sessions(self) -> list[SessionDetails]:
        """Every session that is attached, superseded or quarantined."""
        return [
            SessionDetails(
                session=session.stats(),
                sequences=len(session.sequences.by_id),
                waiting_opens=len(session.sequences.refused_opens),
                held_blocks=len({block for _, block in session.sequences.holds}),
                number=session.last_number,
                step=session.last_step,
                completed_step=session.completed_step,
            )
            for session in self._sessions.values()
        ]

    def sequences(self) -> Iterator[list[tuple[Epoch, SequenceId, Sequence]]]:
        """Every open sequence, slice by slice; those that end meanwhile are left out."""
        names = [(epoch, name) for epoch, session in self._sessions.items() for name in session.sequences.by_id]
        rows, num_entries = [], 0
        for epoch, name in names:
            session = self._sessions.get(epoch)
            sequence = session.sequences.by_id.get(name) if session else None
            if sequence is None:
                continue
            rows.append((epoch, name, sequence))
            num_entries += 1 + len(sequence.blocks)
            if num_entries >= SLICE_BLOCKS:
                yield rows
                rows, num_entries = [], 0
        yield rows

    def blocks(self, states: Container[BlockState]) -> Iterator[list[Block]]:
        """Every block in one of these states, slice by slice."""
        first = 0
        while first < len(self._pool.blocks):
            last = first + SLICE_BLOCKS
            yield [block for block in self._pool.blocks[first:last] if block.state in states]
            first = last

    def audit(self) -> Iterator[list[str]]:
        """Check every invariant slice by slice: one sentence for each one that is broken."""
        yield check_counts(self._pool)
        yield check_free_queue(self._pool)
        quarantined = [block for session in self._sessions.values() for block in session.quarantined]
        yield check_sessions(self._pool, self._all_sequences(), quarantined)
        first = 0
        while first < len(self._pool.blocks):
            last = first + SLICE_BLOCKS
            yield check_blocks(self._pool, first, last, self._all_sequences())
            first = last

    def check_integrity(self) -> list[str]:
        """Check every invariant at once: one sentence for each one that is broken."""
        return [violation for violations in self.audit() for violation in violations]

    def _all_sequences(self) -> list[Sequences]:
        return [session.sequences for session in self._sessions.values()]

    def _usage(self, block_size: int) -> UsageStats:
        sequences = [sequence for each in self._all_sequences() for sequence in each.by_id.values()]
        filled: dict[Block, int] = {}
        for sequence in sequences:
            for index in range(sequence.num_sealed, len(sequence.blocks)):
                block = sequence.blocks[index]
                if block.state is BlockState.LEASED:
                    slots = min(block_size, sequence.length - index * block_size)
                    filled[block] = max(slots, filled.get(block, 0))
        num_sealed = self._pool.num_referenced - len(filled)
        return UsageStats(
            sequences=len(sequences),
            logical_tokens=sum(sequence.length for sequence in sequences),
            resident_tokens=num_sealed * block_size + sum(filled.values()),
            logical_blocks=sum(len(sequence.blocks) for sequence in sequences),
            physical_blocks=self._pool.num_referenced,
            block_size=block_size,
        )
