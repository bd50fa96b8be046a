"""What runners see of a cache, told a second time in the plainest way: no counts, no queues, only what is where.

The memory is modelled as well. Every slot holds the whole history it was computed from, so that a block which was
shared, copied, folded, evicted or granted anew at the wrong moment is noticed by whoever reads it.
"""

from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from cache_manager.events import BlocksRemoved, BlockStored, CacheEvent
from pagekeeper.common.ids import BlockHash
from pagekeeper.common.operations import BlockCopy, BlockRef, Operation, Result
from tests.fakes.policy_session import BLOCK_SIZE, PolicySession

Content = tuple[str, tuple[int, ...]]
"""A tenant, and all tokens up to and including the one at this position."""


@dataclass
class NaiveSequence:
    tenant: str
    tokens: list[int]
    table: list[BlockRef]
    computed: int
    """Tokens whose slots are filled, by steps that have ended."""
    named: int
    """The length in the last message about it."""
    writable: int
    """Positions below may be filled without a message."""
    num_sealed: int
    in_flight_to: int | None = None
    """`computed` once the step in flight has ended; None if that step does not concern it, or no longer."""

    @property
    def num_unsealed(self) -> int:
        """Blocks that are full and could be sealed."""
        return self.computed // BLOCK_SIZE - self.num_sealed

    def content(self, position: int) -> Content:
        return self.tenant, tuple(self.tokens[: position + 1])

    def block_content(self, index: int) -> Content:
        return self.content((index + 1) * BLOCK_SIZE - 1)

    @property
    def tail(self) -> list[int]:
        """Tokens that a Release names."""
        return self.tokens[self.num_sealed * BLOCK_SIZE : self.computed][: BLOCK_SIZE - 1]


class NaiveFindable:
    """What can be found by its tokens: full blocks and tails."""

    def __init__(self) -> None:
        self.blocks: dict[Content, int] = {}
        self.tails: dict[int, Content] = {}

    def all(self) -> set[int]:
        return {*self.blocks.values(), *self.tails}

    def keep(self, block_ids: set[int]) -> None:
        """Forget all others."""
        self.blocks = {content: block for content, block in self.blocks.items() if block in block_ids}
        self.tails = {block: content for block, content in self.tails.items() if block in block_ids}

    def add_tail(self, block: int, tail: Content) -> None:
        """As long as nothing that is found begins with the same tokens."""
        tenant, history = tail
        index, length = divmod(len(history) - 1, BLOCK_SIZE)
        if length + 1 not in self.common(tenant, list(history), index, len(history)).values():
            self.tails[block] = tail

    def common(self, tenant: str, tokens: list[int], index: int, most: int) -> dict[int, int]:
        """How many tokens at most, from block `index` of a sequence on, stand in which block at that place."""
        first, found = index * BLOCK_SIZE, {}
        for (owner, history), block in [*self.blocks.items(), *((tail, block) for block, tail in self.tails.items())]:
            if (
                owner == tenant
                and (len(history) - 1) // BLOCK_SIZE == index
                and history[:first] == tuple(tokens[:first])
            ):
                pairs = zip(history[first:], tokens[first:most], strict=False)
                found[block] = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        return found


@dataclass
class Step:
    """What a launched step reads and writes; it does so at any time until it ends."""

    copies: list[BlockCopy]
    writes: list[tuple[int, int, Content]]
    reads: list[tuple[int, int, Content]]


@dataclass
class NaiveSession:
    driver: PolicySession
    findable: NaiveFindable
    sequences: dict[int, NaiveSequence] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    """Opens answered with Shortage and not given up."""
    holds: list[tuple[int, int]] = field(default_factory=list)
    tails: dict[int, Content] = field(default_factory=dict)
    """Released, but still held."""
    planned_copies: list[BlockCopy] = field(default_factory=list)
    step: int = 0
    completed_step: int = 0
    in_flight: Step | None = None
    num_messages: int = 0
    supersedes: "NaiveSession | None" = None

    def end_holds(self) -> None:
        """What the next message does before anything else."""
        while self.holds and self.holds[0][0] <= self.completed_step:
            _, block = self.holds.pop(0)
            if block in self.tails and all(block != held for _, held in self.holds):
                self.findable.add_tail(block, self.tails.pop(block))

    def send(self, *operations: Operation) -> list[Result]:
        """The next message. The holds that it begins are the caller's to add."""
        self.num_messages += 1
        self.end_holds()
        return self.driver.message(self.step, self.completed_step, *operations)

    def hold(self, block: BlockRef) -> None:
        self.holds.append((self.step + 1, block.id))

    def blocks(self) -> set[int]:
        named = {ref.id for sequence in self.sequences.values() for ref in sequence.table}
        return named | {block for _, block in self.holds}


class NaiveMemory:
    """`slots[block][slot]`; what was never written is None."""

    def __init__(self, num_blocks: int) -> None:
        self.slots: list[list[Content | None]] = [[None] * BLOCK_SIZE for _ in range(num_blocks)]

    def run(self, step: Step) -> None:
        """Do the copies, then the writes, then check every read."""
        for copy in step.copies:
            self.slots[copy.destination.id][: copy.num_tokens] = self.slots[copy.source.id][: copy.num_tokens]
        for block, slot, content in step.writes:
            self.slots[block][slot] = content
        for block, slot, content in step.reads:
            assert self.slots[block][slot] == content, f"slot {slot} of block {block} is not what its reader computed"


class NaiveIndex:
    """What can be found by content, according to the events alone."""

    def __init__(self) -> None:
        self.hashes: set[BlockHash] = set()
        self.last_number = 0

    def listen(self, event: CacheEvent) -> None:
        assert event.number == self.last_number + 1
        self.last_number = event.number
        match event:
            case BlockStored(block_hash=block_hash, parent_hash=parent_hash, token_ids=token_ids):
                assert len(token_ids) == BLOCK_SIZE
                assert parent_hash is None or parent_hash in self.hashes, "what a sealed block follows is found as well"
                assert block_hash not in self.hashes
                self.hashes.add(block_hash)
            case BlocksRemoved(block_hashes=block_hashes):
                assert self.hashes.issuperset(block_hashes)
                self.hashes.difference_update(block_hashes)


class NaiveTickets:
    """Refused Opens in the order of their first attempts."""

    def __init__(self, lapse_after: int) -> None:
        self._lapse_after = lapse_after
        self._waiting: list[list[Any]] = []

    def may_try(self, sessions: list[NaiveSession], session: NaiveSession, sequence: int) -> bool:
        while (
            self._waiting and self._waiting[0][:2] != [session, sequence] and self._lapsed(sessions, self._waiting[0])
        ):
            del self._waiting[0]
        return not self._waiting or self._waiting[0][:2] == [session, sequence]

    def wait(self, sessions: list[NaiveSession], session: NaiveSession, sequence: int) -> None:
        mine = next((ticket for ticket in self._waiting if ticket[:2] == [session, sequence]), None)
        if mine is not None and self._lapsed(sessions, mine):
            self._waiting.remove(mine)
            mine = None
        if mine is None:
            mine = [session, sequence, 0]
            self._waiting.append(mine)
        mine[2] = self._messages_of_others(sessions, session)

    def withdraw(self, session: NaiveSession, sequence: int | None = None) -> None:
        """One sequence's ticket, or all of a session's."""
        self._waiting = [
            ticket for ticket in self._waiting if ticket[0] is not session or sequence not in (None, ticket[1])
        ]

    def _lapsed(self, sessions: list[NaiveSession], ticket: list[Any]) -> bool:
        return self._messages_of_others(sessions, ticket[0]) - ticket[2] >= self._lapse_after

    @staticmethod
    def _messages_of_others(sessions: list[NaiveSession], session: NaiveSession) -> int:
        return sum(other.num_messages for other in sessions if other is not session)
