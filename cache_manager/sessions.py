"""The whole policy of the cache manager: sessions, the pool they share, and the order of their messages."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

from cache_manager.block_pool import BlockPool
from cache_manager.events import CacheCleared, EventListener
from cache_manager.prefix_cache import Fingerprint, root_hash
from cache_manager.sequences import Sequences
from cache_manager.state import SLICE_BLOCKS, CacheState, Session, SessionState
from cache_manager.tickets import OpenTickets
from kernels.kv_layout import KvLayout
from pagekeeper.common.errors import BugError, ConfigurationError
from pagekeeper.common.ids import Epoch
from pagekeeper.common.operations import (
    Extend,
    Fork,
    Open,
    Opened,
    Operation,
    Refused,
    Release,
    Released,
    Result,
    Seal,
    Shortage,
    StepMessage,
)


class ProtocolViolation(BugError):
    """A message that no correct runner sends. Nothing was changed; the stream that carried it must end."""


@dataclass(frozen=True)
class Attachment:
    """A new session, and the pool as it is carved for it."""

    epoch: Epoch
    num_blocks: int
    watermark_blocks: int
    dropped_blocks: int
    """Cached blocks that were lost because the pool was carved anew for another layout or model."""


class CachePolicy(CacheState):
    """Decides who may use which block. Pure: no input but its arguments, no effect but its state and its results.

    The layout is fixed by the first attachment; `pool_bytes` are then carved into blocks. With no session left and
    nothing quarantined, an attachment with another layout or fingerprint carves them anew.
    """

    def __init__(self, pool_bytes: int, watermark: float = 0.01) -> None:
        super().__init__()
        self._pool_bytes = pool_bytes
        self._watermark = watermark
        self._fingerprint: Fingerprint | None = None
        self._tickets = OpenTickets()
        self._last_epoch = 0

    def attach(
        self,
        runner_id: str,
        pid: int,
        layout: KvLayout,
        fingerprint: Fingerprint,
        now: float,
        supersedes: Epoch | None = None,
    ) -> Attachment:
        """Begin a session.

        Args:
            runner_id: for statistics.
            pid: for statistics.
            layout: shape of a block.
            fingerprint: what the runner's blocks depend on besides their tokens.
            now: seconds since the Unix epoch, for statistics.
            supersedes: an older session of the same runner. It can do nothing any more, and ends once the first
                message of the new one has been applied.

        Raises:
            ConfigurationError: the pool is in use with another layout or fingerprint (the message begins with the
                field that differs), or is too small for two blocks.
        """
        dropped = self._carve_for(layout, fingerprint)
        self._last_epoch += 1
        epoch = Epoch(self._last_epoch)
        watermark = self._watermark_blocks(layout.num_blocks(self._pool_bytes))
        root = root_hash(fingerprint, layout)
        sequences = Sequences(self._pool, root, layout.block_size, watermark, self._counters)
        older = self._sessions.get(supersedes) if supersedes is not None else None
        if older is not None:
            # Its runner stood at a step boundary when it attached again, so what came before it is over.
            if older.supersedes is not None:
                self.detach(older.supersedes)
                older.supersedes = None
            older.state = SessionState.SUPERSEDED
            self._tickets.withdraw_all(older.epoch)
        self._sessions[epoch] = Session(epoch, runner_id, pid, now, sequences, supersedes)
        return Attachment(epoch, layout.num_blocks(self._pool_bytes), watermark, dropped)

    def apply(self, epoch: Epoch, message: StepMessage) -> list[Result]:
        """Apply one message: first the report of ended steps, then its operations in their order.

        Raises:
            ProtocolViolation: the session has ended, or the message is not its next. Nothing was changed.
        """
        session = self._sessions.get(epoch)
        if session is None or session.state is not SessionState.ATTACHED:
            raise ProtocolViolation(f"session {epoch} has ended")
        if message.number != session.last_number + 1:
            raise ProtocolViolation(f"message {message.number} is not the next one after {session.last_number}")
        if message.step < session.last_step:
            raise ProtocolViolation(f"step {message.step} was sent after step {session.last_step}")
        if not session.completed_step <= message.completed_step <= message.step:
            raise ProtocolViolation(
                f"completed step {message.completed_step} is not between {session.completed_step}, reported before, "
                f"and {message.step}, the step of the message"
            )
        session.last_number = message.number
        session.last_step = message.step
        session.completed_step = message.completed_step
        self._tickets.count_message(epoch)
        session.sequences.begin(message.step, message.completed_step)
        results = [self._apply_one(session, operation) for operation in message.operations]
        if session.supersedes is not None:
            superseded, session.supersedes = session.supersedes, None
            self.detach(superseded)
        return results

    def detach(self, epoch: Epoch, *, quarantine: bool = False) -> list[Epoch]:
        """End a session: its runner is gone, or has replaced it. Ending one that has ended does nothing.

        Args:
            epoch: the session; those that it was to supersede end with it.
            quarantine: its device work may outlive it, so blocks that it could write wait for `settle`.

        Returns:
            The sessions among these that have such blocks.
        """
        session = self._sessions.get(epoch)
        if session is None or session.state is SessionState.QUARANTINED:
            return []
        waiting: list[Epoch] = []
        if session.supersedes is not None:
            waiting = self.detach(session.supersedes, quarantine=quarantine)
        self._tickets.withdraw_all(epoch)
        session.quarantined = session.sequences.end(quarantine=quarantine)
        session.state = SessionState.QUARANTINED
        if session.quarantined:
            return [*waiting, epoch]
        del self._sessions[epoch]
        return waiting

    def settle(self, epoch: Epoch) -> None:
        """The device work of a quarantined session has ended: its blocks become FREE."""
        session = self._sessions.get(epoch)
        if session is not None and session.state is SessionState.QUARANTINED:
            self._pool.release_quarantined(session.quarantined)
            del self._sessions[epoch]

    def flush(self) -> Iterator[int]:
        """Make what is cached now unfindable, slice by slice: yields how many blocks each one dropped."""
        remaining = self._pool.free_queue.num_cached
        while remaining > 0:
            yield self._pool.flush(min(remaining, SLICE_BLOCKS))
            remaining -= SLICE_BLOCKS

    def listen(self, listener: EventListener | None) -> None:
        """Tell `listener` of every change of what can be found by content from now on, or nobody."""
        self._pool.listener = listener

    def _carve_for(self, layout: KvLayout, fingerprint: Fingerprint) -> int:
        """Make the pool fit, if it does not; returns how many cached blocks that cost."""
        difference = self._difference(layout, fingerprint)
        if self._layout is not None and difference is None:
            return 0
        if self._sessions:
            raise ConfigurationError(f"{difference}; the pool is in use")
        num_blocks = layout.num_blocks(self._pool_bytes)
        if num_blocks - 1 - self._watermark_blocks(num_blocks) < 1:
            raise ConfigurationError(
                f"pool_size: {self._pool_bytes} bytes are too small; a block of this model has {layout.block_bytes} "
                "bytes, and the least useful pool has three (the null block, one to use, one to leave free)"
            )
        dropped = self._pool.free_queue.num_cached
        self._layout, self._fingerprint = layout, fingerprint
        listener = self._pool.listener
        self._pool = BlockPool(num_blocks, self._counters, listener)
        if dropped:
            self._counters.events += 1
            if listener is not None:
                listener(CacheCleared(self._counters.events))
        return dropped

    def _difference(self, layout: KvLayout, fingerprint: Fingerprint) -> str | None:
        """Which field keeps two runners from sharing the pool."""
        if self._layout is None or self._fingerprint is None:
            return None
        for held, wanted in ((self._layout, layout), (self._fingerprint, fingerprint)):
            for item in fields(held):
                old, new = getattr(held, item.name), getattr(wanted, item.name)
                if old != new:
                    return f"{item.name}: the pool holds blocks for {old!r}, this runner has {new!r}"
        return None

    def _watermark_blocks(self, num_blocks: int) -> int:
        return max(1, int(num_blocks * self._watermark))

    def _apply_one(self, session: Session, operation: Operation) -> Result:
        match operation:
            case Open():
                return self._open(session, operation)
            case Extend():
                return session.sequences.extend(operation)
            case Seal():
                return session.sequences.seal(operation)
            case Fork():
                return session.sequences.fork(operation)
            case Release():
                return self._release(session, operation)

    def _open(self, session: Session, operation: Open) -> Opened | Shortage | Refused:
        """Serve Opens in the order of their first attempts, whichever session they are of."""
        epoch, sequence = session.epoch, operation.sequence
        refusal = session.sequences.refusal_of(operation)
        if refusal is not None:
            self._tickets.withdraw(epoch, sequence)
            return refusal
        if self._tickets.may_try(epoch, sequence):
            result = session.sequences.open(operation)
        else:
            result = session.sequences.shortage(session.sequences.most_needed(operation))
        if isinstance(result, Shortage):
            self._tickets.wait(epoch, sequence)
            session.sequences.refused_opens.add(sequence)
        else:
            self._tickets.withdraw(epoch, sequence)
            session.sequences.refused_opens.discard(sequence)
        return result

    def _release(self, session: Session, operation: Release) -> Released | Refused:
        result = session.sequences.release(operation)
        if isinstance(result, Released):
            self._tickets.withdraw(session.epoch, operation.sequence)
        return result
