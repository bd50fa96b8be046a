"""Two runners at a tiny pool, with a vocabulary of two tokens, against a naive model after every message."""

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache_manager.tickets import OpenTickets
from pagekeeper.common.operations import (
    BlockCopy,
    Extend,
    Extended,
    Fork,
    Forked,
    Open,
    Opened,
    Refused,
    Release,
    Released,
    Result,
    Seal,
    Sealed,
    Shortage,
)
from tests.fakes.policy_session import BLOCK_SIZE, PolicySession, tiny_policy
from tests.property.naive_cache import (
    NaiveFindable,
    NaiveIndex,
    NaiveMemory,
    NaiveSequence,
    NaiveSession,
    NaiveTickets,
    Step,
)

NUM_BLOCKS = 8
WATERMARK = 1
LAPSE_AFTER = 12
"""So few messages that some tickets lapse within an example."""
MOST_BLOCKS = NUM_BLOCKS - 1 - WATERMARK

TENANT = st.sampled_from("aab")
TOKEN = st.integers(0, 1)
WHICH = st.integers(0, 1)
ONE_IN_FOUR = st.integers(0, 3)
"""Zero is the one; otherwise no session would live long enough to do something."""
PROMPT = st.one_of(
    st.lists(TOKEN, min_size=1, max_size=17),
    st.integers(1, 2 * BLOCK_SIZE).map(lambda length: [0] * length),
    st.integers(1, NUM_BLOCKS * BLOCK_SIZE).map(lambda length: [0] * length),
)


def blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


BUSY = precondition(lambda self: any(session.sequences for session in self.sessions))


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.policy = tiny_policy(NUM_BLOCKS)
        self.memory = NaiveMemory(NUM_BLOCKS)
        self.tickets = NaiveTickets(LAPSE_AFTER)
        self.policy._tickets = OpenTickets(LAPSE_AFTER)
        self.index = NaiveIndex()
        self.policy.listen(self.index.listen)
        self.findable = NaiveFindable()
        self.sessions = [NaiveSession(PolicySession(self.policy), self.findable) for _ in range(2)]
        self.ended: list[NaiveSession] = []
        self.limbo: list[tuple[list[NaiveSession], set[int]]] = []
        self.generations = [0] * NUM_BLOCKS
        self.last_sequence = 0

    # What is where, recounted each time

    def superseded(self) -> list[NaiveSession]:
        return [session.supersedes for session in self.sessions if session.supersedes]

    def in_use(self) -> set[int]:
        return set().union(*(session.blocks() for session in (*self.sessions, *self.superseded())))

    def num_free(self) -> int:
        quarantined = set().union(*(blocks for _, blocks in self.limbo))
        return NUM_BLOCKS - 1 - len(self.in_use() | quarantined)

    def references(self, block: int) -> int:
        sequences = [sequence for session in self.sessions for sequence in session.sequences.values()]
        return sum(ref.id == block for sequence in sequences for ref in sequence.table)

    def is_sealed(self, block: int) -> bool:
        return block in self.findable.blocks.values()

    def send(self, session: NaiveSession, operation: Open | Extend | Seal | Fork | Release) -> Result:
        (result,) = session.send(operation)
        return result

    def after_message(self, session: NaiveSession) -> None:
        if session.supersedes is not None:
            self.ended.append(session.supersedes)
            session.supersedes = None

    def everybody(self) -> list[NaiveSession]:
        return [*self.sessions, *self.superseded(), *self.ended]

    def granted(self, ref_id: int, generation: int, was_in_use: set[int]) -> None:
        assert ref_id != 0, "the null block was granted"
        assert ref_id not in was_in_use, f"block {ref_id} was granted while in use"
        assert all(ref_id not in blocks for _, blocks in self.limbo), f"block {ref_id} was granted from quarantine"
        assert generation > self.generations[ref_id]
        self.generations[ref_id] = generation
        self.findable.keep(self.findable.all() - {ref_id})

    def busy(self, which: int) -> NaiveSession:
        return self.sessions[which] if self.sessions[which].sequences else self.sessions[1 - which]

    def pick(self, data: st.DataObject, session: NaiveSession) -> tuple[int, NaiveSequence]:
        name = data.draw(st.sampled_from(sorted(session.sequences)), label="sequence")
        return name, session.sequences[name]

    # Messages

    @rule(
        which=WHICH,
        tenant=TENANT,
        prompt=PROMPT,
        chunk=st.integers(1, 100),
        all_but=st.integers(0, 1),
        retry=st.booleans(),
    )
    def open(self, which: int, tenant: str, prompt: list[int], chunk: int, all_but: int, retry: bool) -> None:
        session = self.sessions[which]
        if retry and session.refused:
            name = min(session.refused)
        else:
            name = self.last_sequence = self.last_sequence + 1
        sequence = NaiveSequence(tenant, prompt, [], 0, 0, 0, 0)
        most_cached = len(prompt) - all_but
        session.end_holds()
        hits: list[int] = []
        while len(hits) < most_cached // BLOCK_SIZE and sequence.block_content(len(hits)) in self.findable.blocks:
            hits.append(self.findable.blocks[sequence.block_content(len(hits))])
        common = self.findable.common(tenant, prompt, len(hits), most_cached)
        free, in_use = self.num_free(), self.in_use()
        needed = blocks_for(len(prompt)) + WATERMARK

        result = self.send(session, Open(name, tenant, prompt, len(prompt) - all_but, chunk))
        fits = blocks_for(len(prompt)) <= MOST_BLOCKS
        is_first = fits and self.tickets.may_try(self.everybody(), session, name)
        if is_first:
            needed -= len(in_use.intersection(hits))
        if not fits:
            assert isinstance(result, Refused)
            self.tickets.withdraw(session, name)
        elif not is_first or needed > free:
            assert result == Shortage(needed, free, result.releasing_blocks)
            self.tickets.wait(self.everybody(), session, name)
            session.refused.add(name)
        else:
            assert isinstance(result, Opened)
            self.tickets.withdraw(session, name)
            session.refused.discard(name)
            self.copied_from_the_best(session, result, common, len(hits), needed < free, in_use)
            cached = len(hits) * BLOCK_SIZE + sum(copy.num_tokens for copy in result.copies)
            sequence.named = min(cached + chunk, len(prompt))
            assert result.num_cached_tokens == cached
            assert [ref.id for ref in result.blocks[: len(hits)]] == hits
            assert len(result.blocks) == blocks_for(sequence.named)
            sources = [copy.source.id for copy in result.copies]
            for position in range(cached):
                content = self.memory.slots[[*hits, *sources][position // BLOCK_SIZE]][position % BLOCK_SIZE]
                assert content == sequence.content(position), "a hit holds something else"
            for ref in result.blocks[len(hits) :]:
                self.granted(ref.id, ref.generation, in_use.union(hits, sources))
            sequence.table = result.blocks
            sequence.computed = cached
            sequence.num_sealed = len(hits)
            sequence.writable = len(result.blocks) * BLOCK_SIZE
            session.sequences[name] = sequence
        self.after_message(session)

    def copied_from_the_best(
        self, session: NaiveSession, opened: Opened, common: dict[int, int], index: int, spare: bool, in_use: set[int]
    ) -> None:
        """The longest common beginning is copied, unless its source is free and would be missed."""
        longest = max(common.values(), default=0)
        best = {block for block, length in common.items() if length == longest > 0}
        if not opened.copies:
            assert not best or not (spare or best <= in_use), "something could have been copied"
            return
        (copy,) = opened.copies
        assert copy.source.id in best
        assert copy.source.generation == self.generations[copy.source.id]
        assert spare or copy.source.id in in_use
        assert copy == BlockCopy(index, copy.source, opened.blocks[index], longest)
        session.planned_copies.append(copy)
        session.hold(copy.source)

    @BUSY
    @rule(which=WHICH, data=st.data())
    def extend(self, which: int, data: st.DataObject) -> None:
        session = self.busy(which)
        name, sequence = self.pick(data, session)
        longer = st.integers(sequence.named, len(sequence.table) * BLOCK_SIZE + 12)
        shorter = st.integers(1, sequence.computed) if sequence.computed else st.nothing()
        num_tokens = data.draw(longer | shorter, label="num_tokens")
        if num_tokens <= sequence.computed:
            self.give_back(session, name, num_tokens)
            return
        grows = num_tokens > sequence.named
        tail = sequence.table[-1]
        copy = grows and sequence.named % BLOCK_SIZE and (self.is_sealed(tail.id) or self.references(tail.id) > 1)
        kept = len(sequence.table)
        needed = blocks_for(num_tokens) - kept + bool(copy)
        session.end_holds()
        free, in_use = self.num_free(), self.in_use()

        result = self.send(session, Extend(name, num_tokens))
        if grows and needed > free:
            assert result == Shortage(needed, free, result.releasing_blocks)
        else:
            assert isinstance(result, Extended)
            assert result.kept_blocks == kept
            assert len(result.blocks) == blocks_for(num_tokens) - kept
            if copy:
                destination = result.copies[0].destination
                assert result.copies == [BlockCopy(kept - 1, tail, destination, sequence.named % BLOCK_SIZE)]
                self.granted(destination.id, destination.generation, in_use)
                session.planned_copies.append(result.copies[0])
                session.hold(tail)
                sequence.table[-1] = destination
            else:
                assert result.copies == []
            for ref in result.blocks:
                self.granted(ref.id, ref.generation, in_use)
            sequence.table += result.blocks
            sequence.named = num_tokens
            if grows:
                sequence.writable = len(sequence.table) * BLOCK_SIZE
        self.after_message(session)

    def give_back(self, session: NaiveSession, name: int, num_tokens: int) -> None:
        result = self.send(session, Extend(name, num_tokens))
        self.cut_back(session, session.sequences[name], num_tokens)
        assert result == Extended(len(session.sequences[name].table), [])
        self.after_message(session)

    def cut_back(self, session: NaiveSession, sequence: NaiveSequence, num_tokens: int) -> None:
        while len(sequence.table) > blocks_for(num_tokens):
            session.hold(sequence.table.pop())
        sequence.named = sequence.writable = num_tokens
        sequence.computed = min(sequence.computed, num_tokens)
        sequence.tokens = sequence.tokens[: max(num_tokens, sequence.computed)]
        sequence.num_sealed = min(sequence.num_sealed, num_tokens // BLOCK_SIZE)
        sequence.in_flight_to = None

    def seal(self, session: NaiveSession, name: int, count: int) -> None:
        sequence = session.sequences[name]
        first = sequence.num_sealed
        refs = sequence.table[first : first + count]
        tokens = sequence.tokens[first * BLOCK_SIZE : (first + count) * BLOCK_SIZE]
        result = self.send(session, Seal(name, tokens, refs))
        assert isinstance(result, Sealed)
        for index, (before, after) in enumerate(zip(refs, result.blocks, strict=True), first):
            content = sequence.block_content(index)
            assert after.id == self.findable.blocks.setdefault(content, before.id)
            assert self.memory.slots[after.id][-1] == content
            if after != before:
                session.hold(before)
                sequence.table[index] = after
        sequence.num_sealed += count
        sequence.named = max(sequence.named, sequence.num_sealed * BLOCK_SIZE)
        self.after_message(session)

    @BUSY
    @rule(which=WHICH, num_children=st.integers(1, 2), data=st.data())
    def fork(self, which: int, num_children: int, data: st.DataObject) -> None:
        session = self.busy(which)
        candidates = sorted(name for name, sequence in session.sequences.items() if sequence.computed)
        if not candidates:
            return
        name = data.draw(st.sampled_from(candidates), label="parent")
        parent = session.sequences[name]
        num_tokens = data.draw(st.integers(1, parent.computed), label="num_tokens")
        children = [self.last_sequence + 1 + index for index in range(num_children)]
        self.last_sequence += num_children
        assert self.send(session, Fork(name, num_tokens, children)) == Forked()
        self.cut_back(session, parent, num_tokens)
        for child in children:
            session.sequences[child] = NaiveSequence(
                parent.tenant,
                parent.tokens.copy(),
                parent.table.copy(),
                parent.computed,
                parent.named,
                parent.writable,
                parent.num_sealed,
            )
        self.after_message(session)

    @BUSY
    @rule(which=WHICH, data=st.data())
    def release(self, which: int, data: st.DataObject) -> None:
        session = self.busy(which)
        name, _ = self.pick(data, session)
        self.release_one(session, name)

    def release_one(self, session: NaiveSession, name: int) -> None:
        sequence = session.sequences[name]
        tail = sequence.tail
        if tail:
            block = sequence.table[sequence.num_sealed].id
            if self.references(block) == 1 and not self.is_sealed(block):
                session.tails[block] = sequence.content(sequence.num_sealed * BLOCK_SIZE + len(tail) - 1)
        assert self.send(session, Release(name, tail)) == Released()
        for ref in session.sequences.pop(name).table:
            session.hold(ref)
        self.after_message(session)

    @precondition(lambda self: any(session.refused for session in self.sessions))
    @rule(which=WHICH)
    def give_up(self, which: int) -> None:
        session = self.sessions[which]
        if session.refused:
            name = min(session.refused)
            session.refused.remove(name)
            self.tickets.withdraw(session, name)
            assert self.send(session, Release(name)) == Released()
            self.after_message(session)

    @rule(odds=ONE_IN_FOUR)
    def flush(self, odds: int) -> None:
        if odds:
            return
        num_cached = self.policy.stats().pool.cached_blocks
        assert sum(self.policy.flush()) == num_cached
        self.findable.keep(self.in_use())

    # Steps

    @BUSY
    @rule(which=WHICH, data=st.data())
    def launch(self, which: int, data: st.DataObject) -> None:
        """A step begins; the one before it has ended, and what that filled is sealed, now or later."""
        self.launch_step(self.sessions.index(self.busy(which)), data)

    def launch_step(self, which: int, data: st.DataObject) -> None:
        self.finish(which)
        session = self.sessions[which]
        for name, sequence in session.sequences.items():
            if sequence.num_unsealed:
                self.seal(session, name, data.draw(st.integers(1, sequence.num_unsealed), label="sealed"))
        session.step += 1
        step = Step(session.planned_copies, [], [])
        session.planned_copies = []
        for sequence in session.sequences.values():
            room = max(0, sequence.writable - len(sequence.tokens))
            sequence.tokens += data.draw(st.lists(TOKEN, max_size=room) | st.just([0] * room), label="generated")
            until = max(sequence.computed, min(sequence.writable, len(sequence.tokens)))
            for position in range(until):
                place = (sequence.table[position // BLOCK_SIZE].id, position % BLOCK_SIZE, sequence.content(position))
                (step.reads if position < sequence.computed else step.writes).append(place)
            sequence.in_flight_to = until
        step.reads += step.writes
        session.in_flight = step

    @rule(which=WHICH, tenant=TENANT, prompt=PROMPT, data=st.data(), odds=ONE_IN_FOUR, dies=ONE_IN_FOUR)
    def serve(self, which: int, tenant: str, prompt: list[int], data: st.DataObject, odds: int, dies: int) -> None:
        """A short request, until what it leaves behind can be found, or is lost."""
        if odds:
            return
        self.open(which, tenant, prompt, chunk=100, all_but=1, retry=False)
        session = self.sessions[which]
        if self.last_sequence in session.sequences:
            self.launch_step(which, data)
            self.finish(which)
            self.release_one(session, self.last_sequence)
            if not dies:
                self.die(which, quarantine=False, odds=0)
                return
            self.launch_step(which, data)
            self.finish_and_report(which)

    @precondition(lambda self: any(session.in_flight for session in self.sessions))
    @rule(which=WHICH)
    def finish_and_report(self, which: int) -> None:
        self.finish(which)
        assert self.sessions[which].send() == []
        self.after_message(self.sessions[which])

    def finish(self, which: int) -> None:
        session = self.sessions[which]
        if session.in_flight is None:
            return
        self.memory.run(session.in_flight)
        session.in_flight = None
        session.completed_step = session.step
        for sequence in session.sequences.values():
            if sequence.in_flight_to is not None:
                sequence.computed = sequence.in_flight_to

    # The ends of sessions

    @BUSY
    @rule(which=WHICH, quarantine=st.booleans(), odds=ONE_IN_FOUR)
    def die(self, which: int, quarantine: bool, odds: int) -> None:
        if odds:
            return
        session = self.sessions[which]
        dead = [session, session.supersedes] if session.supersedes else [session]
        session.supersedes = None
        self.ended += dead
        for each in dead:
            self.tickets.withdraw(each)
        self.policy.detach(session.driver.epoch, quarantine=quarantine)
        if quarantine:
            writable = {block for each in dead for block in each.blocks() - self.findable.all()}
            self.limbo.append((dead, writable))
        self.sessions[which] = NaiveSession(PolicySession(self.policy), self.findable)

    @precondition(lambda self: self.limbo)
    @rule()
    def settle(self) -> None:
        dead, _ = self.limbo.pop(0)
        for session in dead:
            if session.in_flight is not None:
                # What it reads may have changed under it: only its writes could do harm.
                self.memory.run(replace(session.in_flight, reads=[]))
            self.policy.settle(session.driver.epoch)

    @BUSY
    @rule(which=WHICH, odds=ONE_IN_FOUR)
    def reattach(self, which: int, odds: int) -> None:
        old = self.sessions[which]
        if odds or old.supersedes is not None:
            return
        self.finish(which)
        self.tickets.withdraw(old)
        self.sessions[which] = NaiveSession(
            PolicySession(self.policy, supersedes=old.driver), self.findable, supersedes=old
        )

    # Always

    @invariant()
    def the_policy_and_the_model_agree(self) -> None:
        assert self.policy.check_integrity() == []
        assert self.policy._pool.prefix_cache._blocks.keys() == self.index.hashes
        stats = self.policy.stats()
        assert stats.counters.events == self.index.last_number
        assert stats.pool.cached_blocks == len(self.findable.all() - self.in_use())
        assert stats.pool.free_blocks == self.num_free()
        sequences = [
            sequence for session in (*self.sessions, *self.superseded()) for sequence in session.sequences.values()
        ]
        tables = [ref.id for sequence in sequences for ref in sequence.table]
        assert stats.usage.logical_blocks == len(tables)
        assert stats.usage.physical_blocks == len(set(tables))
        assert stats.usage.logical_tokens == sum(sequence.named for sequence in sequences)

    def teardown(self) -> None:
        for which, session in enumerate(self.sessions):
            self.finish(which)
            for name in list(session.sequences):
                session.send(Release(name))
            session.step += 1
            session.completed_step = session.step
            session.send()
        while self.limbo:
            self.settle()
        assert self.policy.check_integrity() == []
        assert self.policy.stats().pool.free_blocks == NUM_BLOCKS - 1
