"""The simulated engine says and shows the same as the real one, step by step, whatever comes in between."""

import random
from collections.abc import Callable, Iterator

import pytest

from cache_manager.memory.interface import MappedPool
from model_runner import cache_session, engine
from model_runner.engine import StepCost
from model_runner.scheduler import Scheduler, SchedulerLimits
from model_runner.sequence import Sequence
from model_runner.step import BeamsOutput, Output
from model_runner.submission import RequestLimits, Submissions
from pagekeeper.common.operations import Operation
from pagekeeper.v1 import runner_pb2, types_pb2
from tests.fakes.local_cache import TINY_LAYOUT, LocalCache, LocalPool
from tests.simulation.device import Device, Flight, Inputs, Memory
from tests.simulation.engine import Engine as SimulatedEngine
from tests.simulation.exchange import Exchange
from tests.simulation.manager import Manager, PoolSettings
from tests.simulation.model import STOP, VOCABULARY
from tests.simulation.network import Network
from tests.simulation.process import Process
from tests.simulation.world import World

NUM_BLOCKS = 14
LIMITS = SchedulerLimits(TINY_LAYOUT.block_size, 16, 4)
Log = list[tuple[object, ...]]


class _NoTime:
    """No heartbeat is ever due."""

    @staticmethod
    def monotonic() -> float:
        return 0.0


class RealEngine:
    """The real one, driven on this thread; every step ends as soon as it is launched."""

    def __init__(self) -> None:
        self.log: Log = []
        self.pool = LocalPool(NUM_BLOCKS)
        self.caches: list[LocalCache] = []
        self.device = _SynchronousDevice()
        self.engine = engine.Engine(
            Scheduler(LIMITS), self.device, self._connect, _logging_outputs(self.log), StepCost(60.0, 1.0)
        )
        self.engine._attach()

    def submit(self, *sequences: Sequence) -> None:
        self.engine.submit(*sequences)

    def cancel(self, sequence: Sequence) -> None:
        self.engine.cancel(sequence.id)

    def lose_stream(self) -> None:
        self.caches[-1].lose()

    def step(self) -> None:
        self.engine.step()

    def _connect(self) -> LocalCache:
        log = self.log

        class LoggingCache(LocalCache):
            def send(self, step: int, completed_step: int, operations: list[Operation]) -> None:
                super().send(step, completed_step, operations)
                log.append(("says", step, completed_step, *operations))

        self.caches.append(LoggingCache(self.pool, "runner"))
        return self.caches[-1]


class _SynchronousDevice(Device):
    """As the real engine calls it."""

    def __init__(self) -> None:
        super().__init__("real", None)
        self.memory: Memory

    def bind(self, memory: MappedPool, num_blocks: int) -> None:
        del memory
        self.memory = Memory(num_blocks, TINY_LAYOUT.block_size)
        super().bind(self.memory)

    def unbind(self) -> None:
        pass

    def launch(self, inputs: Inputs) -> Flight:
        flight = super().launch(inputs)
        flight.end()
        return flight


class Simulated:
    """The simulated one, in a world where nothing else happens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: Log = []
        self.world = World(seed=1)
        network = Network(self.world, 1e-6, 1e-6, 0.0)
        settings = PoolSettings(NUM_BLOCKS, TINY_LAYOUT.block_size, 0.01, False, 0.0, 0.0)
        Manager(network, settings).start()
        process = Process(self.world, "simulated")
        self.engine = SimulatedEngine(
            network,
            process,
            Scheduler(LIMITS),
            Device("simulated", None),
            lambda flight: flight.end(),
            lambda: None,
            _logging_outputs(self.log),
            60.0,
        )
        send = Exchange.send

        def send_and_log(exchange: Exchange, step: int, completed_step: int, operations: list[Operation]) -> None:
            send(exchange, step, completed_step, operations)
            self.log.append(("says", step, completed_step, *operations))

        monkeypatch.setattr(Exchange, "send", send_and_log)
        # Its own coroutine never begins: here it is driven step by step.
        self.engine._waits_for = lambda: False
        self._run(self.engine._attach())

    def submit(self, *sequences: Sequence) -> None:
        self.engine.commands.append(lambda: self.engine.scheduler.add(*sequences))

    def cancel(self, sequence: Sequence) -> None:
        self.engine.commands.append(lambda: self.engine.scheduler.cancel(sequence.id))

    def lose_stream(self) -> None:
        exchange = self.engine.session.current
        assert exchange is not None
        assert exchange._stream is not None
        exchange._stream.close()

    def step(self) -> None:
        self._run(self.engine.step())

    def _run(self, coroutine: Iterator[Callable[[], object]]) -> None:
        for waits_for in coroutine:
            assert self.world.run(self.world.now + 10.0, lambda waits_for=waits_for: bool(waits_for()))


def _logging_outputs(log: Log) -> Callable[[int, list[Output | BeamsOutput]], None]:
    def show(step: int, outputs: list[Output | BeamsOutput]) -> None:
        for output in outputs:
            if isinstance(output, BeamsOutput):
                log.append(("shows", step, output.leader.id, output.hypotheses, output.ended))
            else:
                log.append(("shows", step, output.sequence.id, output.position, output.token_id, output.finish_reason))

    return show


def _submit(rng: random.Random) -> runner_pb2.Submit:
    length, max_tokens = rng.randint(1, 30), rng.randint(1, 20)
    sampling = runner_pb2.ResolvedSampling(
        top_p=1, seed=rng.randrange(99), max_tokens=max_tokens, stop_token_ids=[STOP]
    )
    candidates = [runner_pb2.Submit.Candidate(index=index) for index in range(rng.choice((1, 1, 2, 3)))]
    if rng.random() < 0.2:
        sampling.beam_search.CopyFrom(
            types_pb2.BeamSearch(width=2, length_penalty=1, early_stopping=types_pb2.EARLY_STOPPING_FALSE)
        )
        candidates = candidates[:1]
    return runner_pb2.Submit(
        tenant="anna",
        prompt_token_ids=[1, 3, 2] * 2 + rng.choices((1, 2), k=length),
        candidates=candidates,
        sampling=sampling,
        priority=rng.choice((0, 0, 1)),
    )


@pytest.mark.parametrize("seed", range(12))
def test_the_simulated_engine_talks_like_the_real_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # The simulated device reads the tokens of a drafted step at its launch by itself.
    monkeypatch.setattr(engine, "write_sampled_tokens", lambda inputs, step: None)
    monkeypatch.setattr(cache_session, "time", _NoTime)
    rng = random.Random(seed)
    real, simulated = RealEngine(), Simulated(monkeypatch)
    limits = RequestLimits(VOCABULARY, 12 * TINY_LAYOUT.block_size, TINY_LAYOUT.block_size, 12, LIMITS.max_sequences)
    submissions = [Submissions(limits) for _ in range(2)]
    live: list[tuple[Sequence, Sequence]] = []
    for step in range(120):
        if step < 60 and rng.random() < 0.15:
            submit = _submit(rng)
            made = [
                each.beams(submit) if submit.sampling.HasField("beam_search") else each.candidates(submit)
                for each in submissions
            ]
            real.submit(*made[0])
            simulated.submit(*made[1])
            live += zip(*made, strict=True)
        if live and rng.random() < 0.05:
            ours, theirs = live.pop(rng.randrange(len(live)))
            real.cancel(ours)
            simulated.cancel(theirs)
        if rng.random() < 0.02:
            real.lose_stream()
            simulated.lose_stream()
        real.step()
        simulated.step()
        assert real.log == simulated.log
    assert len(real.log) > 60


def test_copies_are_made_in_the_very_step_they_were_granted_for_though_more_requests_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine, "write_sampled_tokens", lambda inputs, step: None)
    monkeypatch.setattr(cache_session, "time", _NoTime)
    real = RealEngine()
    limits = RequestLimits(VOCABULARY, 12 * TINY_LAYOUT.block_size, TINY_LAYOUT.block_size, 12, LIMITS.max_sequences)
    submissions = Submissions(limits)

    def request() -> Sequence:
        sampling = runner_pb2.ResolvedSampling(top_p=1, max_tokens=2, stop_token_ids=[STOP])
        candidates = [runner_pb2.Submit.Candidate()]
        submit = runner_pb2.Submit(tenant="anna", prompt_token_ids=[1] * 5, candidates=candidates, sampling=sampling)
        return submissions.candidates(submit)[0]

    real.submit(request())
    for _ in range(8):
        real.step()
    second = request()
    real.submit(second)
    real.step()
    assert second.num_computed == 4, "the tail of the first answer is to be copied"
    real.submit(request())
    real.step()
    assert second.block_table.blocks[0] in real.device.memory.filled
