"""What the cache manager reports of itself; names and meanings are a contract with `pagekeeper stats --json`."""

from dataclasses import dataclass

from pagekeeper.common.ids import Epoch


@dataclass
class Counters:
    """Counted since the manager's start."""

    lookups: int = 0
    """Opens of sequences seen for the first time. Here and below an Open counts when it succeeds, not at each retry."""
    reopens: int = 0
    """Opens of sequences that had been computed before."""
    queried_tokens: int = 0
    """Tokens of all opened sequences."""
    hit_tokens: int = 0
    """Of them, tokens that came out of the cache, shared or copied."""
    evictions: int = 0
    """Cached blocks granted anew."""
    forks: int = 0
    """Children made."""
    copy_on_write: int = 0
    """Copies of shared tails, made before a write."""
    seals: int = 0
    """Blocks that became SEALED."""
    folds: int = 0
    """Entries renamed to an older block with the same content."""
    shortages: int = 0
    """Operations answered with Shortage."""
    events: int = 0
    """Changes of what can be found by content; the number of the last `CacheEvent`."""


@dataclass(frozen=True)
class PoolStats:
    """Blocks by state; all zero until the first runner has fixed the layout."""

    total_blocks: int
    free_blocks: int
    cached_blocks: int
    leased_blocks: int
    sealed_blocks: int
    quarantined_blocks: int
    block_size: int
    block_bytes: int


@dataclass(frozen=True)
class UsageStats:
    """How well the referenced blocks are used.

    A sequence's length is what was last granted to it (Open, Extend) or what it was last cut back to (Extend, Fork):
    the runner computes into granted slots without a message for each.
    """

    sequences: int
    logical_tokens: int
    resident_tokens: int
    """Filled slots of the referenced blocks, each block once. A LEASED block is as full as the longest sequence that
    names it makes it."""
    logical_blocks: int
    physical_blocks: int
    block_size: int

    @property
    def utilization(self) -> float:
        """Resident tokens / slots of the referenced blocks; 1 when there are none."""
        return self.resident_tokens / (self.physical_blocks * self.block_size) if self.physical_blocks else 1.0

    @property
    def sharing_saved(self) -> float:
        """Share of the block-table entries that need no block of their own; 0 when there are none."""
        return 1 - self.physical_blocks / self.logical_blocks if self.logical_blocks else 0.0


@dataclass(frozen=True)
class SessionStats:
    """One session that is attached, superseded or quarantined."""

    epoch: Epoch
    runner_id: str
    pid: int
    state: str
    attached_at: float


@dataclass(frozen=True)
class SessionDetails:
    """What a session has and how far it is. `held_blocks` wait for the report that a step has ended."""

    session: SessionStats
    sequences: int
    waiting_opens: int
    held_blocks: int
    number: int
    step: int
    completed_step: int


@dataclass(frozen=True)
class CacheStats:
    """Everything at one moment."""

    pool: PoolStats
    usage: UsageStats
    counters: Counters
    sessions: list[SessionStats]
