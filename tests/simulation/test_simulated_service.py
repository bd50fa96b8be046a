"""The simulated service tells gateways and the engine the same as the real one, whatever comes in whichever order."""

import asyncio
import random
from collections import defaultdict, deque
from collections.abc import AsyncIterator
from typing import Any

from model_runner.dispatch import RunnerInfo
from model_runner.report import Activity, EngineReport
from model_runner.sequence import FinishReason, Sequence
from model_runner.service import RunnerService
from model_runner.step import BeamsOutput, Hypothesis, Output
from model_runner.submission import RequestLimits
from pagekeeper.common.ids import SequenceId
from pagekeeper.v1 import runner_pb2, types_pb2
from tests.simulation.network import End, Network
from tests.simulation.process import Process
from tests.simulation.service import RunnerService as SimulatedService
from tests.simulation.world import World

INFO = RunnerInfo("runner", "", RequestLimits(100, 64, 8, 20, 4), runner_pb2.ROLE_DECODE, standby=True)
REPORT = EngineReport(Activity.IN_STEP, 7, 0.25, 4.0, False, 2, 1, 3.0, 0.5, 9, True)
GATEWAYS = ("anna", "bert")
GRACE_S = 60.0
END = "the end"


class FakeEngine:
    """Remembers what it was asked for, by gateway: each gateway's requests are those of a tenant of its name."""

    def __init__(self) -> None:
        self.asked = defaultdict[str, list[tuple[str, int]]](list)
        self.sequences: dict[int, Sequence] = {}
        """Those that outputs are made of: all but the beams behind a search's leader."""

    def submit(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self.asked[sequence.tenant].append(("submit", sequence.id))
        shown = sequences if sequences[0].beams is None else sequences[:1]
        self.sequences |= {sequence.id: sequence for sequence in shown}

    def cancel(self, sequence_id: SequenceId) -> None:
        self.asked[self.sequences[sequence_id].tenant].append(("cancel", sequence_id))

    def report(self) -> EngineReport:
        return REPORT


class Real:
    """The real one, on this event loop."""

    def __init__(self) -> None:
        self.heard = defaultdict[str, list[Any]](list)
        self.engine = FakeEngine()
        self._service = RunnerService(INFO)
        self._service.start(self.engine)
        self._said: dict[str, asyncio.Queue[runner_pb2.ServeRequest | None]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def connect(self, name: str) -> None:
        self._said[name] = said = asyncio.Queue()
        self._tasks.append(asyncio.create_task(self._listen(name, said)))

    async def _listen(self, name: str, said: asyncio.Queue[runner_pb2.ServeRequest | None]) -> None:
        async def requests() -> AsyncIterator[runner_pb2.ServeRequest]:
            while (message := await said.get()) is not None:
                yield message

        async for message in self._service.Serve(requests(), None):
            self.heard[name].append(message)
        if name in self._said:
            self.heard[name].append(END)

    def say(self, name: str, message: runner_pb2.ServeRequest) -> None:
        self._said[name].put_nowait(message)

    def leave(self, name: str) -> None:
        self._said.pop(name).put_nowait(None)

    def deliver(self, step: int, outputs: list[Output | BeamsOutput]) -> None:
        self._service.deliver(step, outputs)

    def drain(self, grace_s: float) -> None:
        self._tasks.append(asyncio.create_task(self._service.drain(grace_s)))

    def end_grace(self) -> None:
        self._service.hurry()

    async def settle(self) -> None:
        for _ in range(30):
            await asyncio.sleep(0)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class _SimulatedEngine(FakeEngine):
    """Does what it is asked for at once."""

    def __init__(self) -> None:
        super().__init__()
        self.commands = deque[Any]()
        self.scheduler = self
        self.add = self.submit
        self.stopping = False

    def poke(self) -> None:
        while self.commands:
            self.commands.popleft()()


class _NoRecomputation:
    def submitted(self, request: str, sequences: list[Sequence]) -> None:
        pass

    def check(self, sequence: Sequence, engine: object) -> None:
        pass


class Simulated(Process):
    """The simulated one, as the only process in its world but for the gateways."""

    def __init__(self) -> None:
        super().__init__(World(seed=1), "runner")
        self.heard = defaultdict[str, list[Any]](list)
        self.engine: Any = _SimulatedEngine()
        recomputation: Any = _NoRecomputation()
        self.service = SimulatedService(INFO, self, self.engine, recomputation)
        self._network = Network(self.world, 1e-6, 1e-6, 0.0)
        self._network.servers["runner"] = self
        self._ends: dict[str, End] = {}

    def accept(self, what: str, end: End) -> None:
        del what
        self.service.accept(end)

    def connect(self, name: str) -> None:
        def set_up(end: End) -> None:
            self._ends[name] = end
            end.on_message = self.heard[name].append
            end.on_end = lambda: self.heard[name].append(END)

        self._network.connect(Process(self.world, name), "runner", "serve", set_up)

    def say(self, name: str, message: runner_pb2.ServeRequest) -> None:
        self._ends[name].send(message)

    def leave(self, name: str) -> None:
        self._ends[name].close()

    def deliver(self, step: int, outputs: list[Output | BeamsOutput]) -> None:
        self.service.deliver(step, outputs)

    def drain(self, grace_s: float) -> None:
        self.service.drain(grace_s)

    def end_grace(self) -> None:
        self.world.run(self.world.now + GRACE_S, lambda: False)

    async def settle(self) -> None:
        self.world.run(self.world.now + 1e-3, lambda: False)


def _submit(rng: random.Random, name: str, attempt: int) -> runner_pb2.ServeRequest:
    sampling = runner_pb2.ResolvedSampling(top_p=1, max_tokens=rng.choice((0, 8, 8, 8)))  # 0 is refused
    indices = rng.sample(range(3), rng.choice((0, 1, 1, 2, 3)))
    candidates = [runner_pb2.Submit.Candidate(index=index) for index in sorted(indices)]
    if rng.random() < 0.3:
        early, width = types_pb2.EARLY_STOPPING_FALSE, 3
        sampling.beam_search.CopyFrom(types_pb2.BeamSearch(width=width, early_stopping=early, intermediate=True))
        candidates = [runner_pb2.Submit.Candidate(index=index) for index in range(len(candidates))]
    elif rng.random() < 0.3:
        sampling.prompt_logprobs = 0
    submit = runner_pb2.Submit(
        request=rng.randint(1, 4),
        attempt=attempt,
        tenant=name,
        prompt_token_ids=[5] * 6,
        candidates=candidates,
        sampling=sampling,
    )
    return runner_pb2.ServeRequest(submit=submit)


def _outputs(rng: random.Random, engines: list[FakeEngine]) -> list[list[Output | BeamsOutput]]:
    """A step's, for the sequences of each engine; some of sequences that nobody waits for any more."""
    outputs: list[list[Output | BeamsOutput]] = [[] for _ in engines]
    known = list(engines[0].sequences)
    for sequence_id in rng.sample(known, min(len(known), rng.randint(1, 4))):
        ends, token = rng.random() < 0.3, rng.randrange(100)
        reason = rng.choice((FinishReason.STOP, FinishReason.LENGTH)) if ends else None
        for each, engine in zip(outputs, engines, strict=True):
            sequence = engine.sequences[sequence_id]
            if sequence.beams is None:
                each.append(Output(sequence, 0, token, reason))
            else:
                each.append(BeamsOutput(sequence, [Hypothesis([token + i], -1.0 - i, reason) for i in range(3)], ends))
    return outputs


def _act(rng: random.Random, both: list[Any], connected: set[str], step: int) -> None:
    """One thing happens to both."""
    name = rng.choice(GATEWAYS)
    request = rng.randint(1, 4)
    if name not in connected:
        connected.add(name)
        for each in both:
            each.connect(name)
        return
    match rng.choices(("submit", "cancel", "ping", "deliver", "leave"), (30, 15, 5, 45, 5))[0]:
        case "submit":
            message = _submit(rng, name, attempt=step)
        case "cancel":
            cancel = runner_pb2.Cancel(request=request, candidates=rng.sample(range(3), rng.choice((0, 1, 2))))
            message = runner_pb2.ServeRequest(cancel=cancel)
        case "ping":
            message = runner_pb2.ServeRequest(ping=runner_pb2.Ping(nonce=step))
        case "deliver":
            for each, outputs in zip(both, _outputs(rng, [each.engine for each in both]), strict=True):
                each.deliver(step, outputs)
            return
        case _:
            connected.discard(name)
            for each in both:
                each.leave(name)
            return
    for each in both:
        each.say(name, message)


async def _compare(seed: int) -> set[str]:
    """Over a whole history; returns which kinds of messages were sent."""
    rng = random.Random(seed)
    real, simulated = both = [Real(), Simulated()]
    connected: set[str] = set()
    drains_at, grace_s = rng.randint(40, 80), rng.choice((0.0, GRACE_S))
    ends_at = drains_at + rng.randint(1, 30)
    for step in range(120):
        if step in (drains_at, ends_at):
            for each in both:
                each.drain(grace_s) if step == drains_at else each.end_grace()
        else:
            _act(rng, both, connected, step)
        for each in both:
            await each.settle()
        assert real.heard == simulated.heard, f"seed {seed}"
        assert real.engine.asked == simulated.engine.asked, f"seed {seed}"
        connected -= {name for name in connected if real.heard[name][-1] == END}
    await real.close()
    return {message.WhichOneof("message") for heard in real.heard.values() for message in heard if message != END}


async def test_the_simulated_service_talks_like_the_real_one() -> None:
    kinds = [await _compare(seed) for seed in range(60)]
    assert set().union(*kinds) == {"hello", "pong", "step", "draining"}
