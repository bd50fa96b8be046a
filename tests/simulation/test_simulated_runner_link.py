"""The simulated link tells runner and router the same as the real one, whatever the runner does."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any, Self

import grpc
import pytest
from structlog.testing import capture_logs

from gateway import runner_link
from gateway.finish_reason import FinishReason
from gateway.generation import Generation, ResolvedRequest
from gateway.liveness import PING_INTERVAL_S
from gateway.router import Router
from gateway.sampling import Sampling
from pagekeeper.v1 import runner_pb2, types_pb2
from tests.simulation.network import End, Network
from tests.simulation.process import Process
from tests.simulation.runner_link import RunnerLink as SimulatedLink
from tests.simulation.world import World

LOST = "lost"
STATES = runner_pb2.EngineReport
REPORTS = (
    STATES(state=STATES.STATE_IDLE, seconds=9.0),
    STATES(state=STATES.STATE_IN_STEP, seconds=2.0, limit_seconds=4.0),
    STATES(state=STATES.STATE_WAITING_FOR_MANAGER, seconds=0.7),
    STATES(state=STATES.STATE_WAITING_FOR_MANAGER, seconds=1.7),
)
HUNG = STATES(state=STATES.STATE_IN_STEP, seconds=4.5, limit_seconds=4.0)
HELLO = runner_pb2.RunnerHello(vocab_size=100, max_context_length=64, role=runner_pb2.ROLE_DECODE, standby=True)


class LoggingRouter(Router):
    """The router, and what it was told by a link."""

    def __init__(self) -> None:
        super().__init__(60.0, lambda: 0.0)
        self.told: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        attribute = super().__getattribute__(name)
        if name not in (
            "ready",
            "report",
            "drain",
            "lose",
            "refuse",
            "take_tokens",
            "take_prompt_logprobs",
            "take_beams",
        ):
            return attribute

        def tell(link: object, *arguments: object, **options: object) -> object:
            self.told.append(f"{name} {arguments} {options}")
            return attribute(link, *arguments, **options)

        return tell


class _SteppedTime:
    """asyncio, whose sleepers sleep until the test wakes them."""

    def __init__(self) -> None:
        self._sleepers: list[asyncio.Future[None]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, _: float) -> None:
        self._sleepers.append(asyncio.get_running_loop().create_future())
        await self._sleepers[-1]

    def wake(self) -> None:
        sleepers, self._sleepers = self._sleepers, []
        for sleeper in sleepers:
            if not sleeper.done():
                sleeper.set_result(None)


class _Call:
    """The stream, as a channel, a stub and a call in one."""

    def __init__(self) -> None:
        self.sent: list[runner_pb2.ServeRequest] = []
        self.said: asyncio.Queue[runner_pb2.ServeResponse | grpc.aio.AioRpcError | None] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        pass

    def Serve(self) -> Self:
        return self

    async def write(self, request: runner_pb2.ServeRequest) -> None:
        self.sent.append(request)

    async def __aiter__(self) -> AsyncIterator[runner_pb2.ServeResponse]:
        while (response := await self.said.get()) is not None:
            if isinstance(response, grpc.aio.AioRpcError):
                raise response
            yield response

    def cancel(self) -> None:
        pass


class Real:
    """The real one, on this event loop, without a network."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.router = LoggingRouter()
        self.calls: list[_Call] = []
        self.links: list[runner_link.RunnerLink] = []
        self.task: asyncio.Task[None] | None = None
        self._time = _SteppedTime()
        monkeypatch.setattr(runner_link, "asyncio", self._time)
        monkeypatch.setattr(grpc.aio, "insecure_channel", lambda target, options: self.calls[-1])
        monkeypatch.setattr(runner_link.runner_pb2_grpc, "RunnerServiceStub", lambda channel: channel)

    @property
    def sent(self) -> list[list[runner_pb2.ServeRequest]]:
        return [call.sent for call in self.calls]

    @property
    def is_connected(self) -> bool:
        return self.task is not None and not self.task.done()

    def connect(self) -> None:
        self.calls.append(_Call())
        link = runner_link.RunnerLink("runner", self.router, lambda: None)
        self.task = asyncio.create_task(link.run())

    def say(self, response: runner_pb2.ServeResponse) -> None:
        self.calls[-1].said.put_nowait(response)

    def end(self, *, breaks: bool) -> None:
        nothing = grpc.aio.Metadata()
        error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "broken")
        self.calls[-1].said.put_nowait(error if breaks else None)

    def pass_time(self) -> None:
        self._time.wake()

    async def settle(self) -> None:
        for _ in range(30):
            await asyncio.sleep(0)

    async def close(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait([self.task])


class Simulated(Process):
    """The simulated one; this process is the runner."""

    def __init__(self) -> None:
        super().__init__(World(seed=1), "runner")
        self.router = LoggingRouter()
        self.sent: list[list[runner_pb2.ServeRequest]] = []
        self.is_connected = False
        self._network = Network(self.world, 1e-7, 1e-7, 0.0)
        self._network.servers["runner"] = self
        self._gateway = Process(self.world, "gateway")
        self._end: End

    def connect(self) -> None:
        self.is_connected = True
        SimulatedLink(self._network, self._gateway, self.router, "runner", lambda: None, self._lost)

    def accept(self, what: str, end: End) -> None:
        del what
        self._end = end
        self.sent.append([])
        end.on_message = self.sent[-1].append

    def _lost(self, was_loss: bool) -> None:
        del was_loss
        self.is_connected = False

    def say(self, response: runner_pb2.ServeResponse) -> None:
        self._end.send(response)

    def end(self, *, breaks: bool) -> None:
        del breaks
        self._end.close()

    def pass_time(self) -> None:
        self.world.run(self.world.now + PING_INTERVAL_S, lambda: False)

    async def settle(self) -> None:
        self.world.run(self.world.now + 1e-5, lambda: False)


class _Script:
    """Draws what happens next, and has it happen to both.

    Attributes:
        generations: each as the real side has it, and as the simulated side has it.
    """

    def __init__(self, rng: random.Random, both: tuple[Real, Simulated]) -> None:
        self.generations: list[tuple[Generation, ...]] = []
        self._rng = rng
        self._both = both
        self._is_silent = False
        self._has_come = False

    def act(self) -> None:
        """One thing."""
        rng = self._rng
        if not self._both[0].is_connected:
            self._is_silent, self._has_come = False, rng.random() < 0.1
            for each in self._both:
                each.connect()
            return
        if not self._has_come:  # otherwise it introduces itself late, or never
            self._has_come = True
            self._say(hello=HELLO)
            return
        weights = {"submit": 8, "cancel": 4, "time": 40, "step": 40, "hello": 3, "drain": 1, "end": 1, "silence": 1}
        match rng.choices(list(weights), weights.values())[0]:
            case "submit":
                self._submit()
            case "cancel" if self.generations:
                self._cancel(rng.choice(self.generations), rng.choice((None, 0, 1)))
            case "time":
                self._pass_time()
            case "step" if self.generations:
                self._say(step=self._step())
            case "hello":
                self._say(hello=HELLO)
            case "drain":
                self._say(draining=runner_pb2.Draining())
            case "end":
                breaks = rng.random() < 0.5
                for each in self._both:
                    each.end(breaks=breaks)
            case "silence":
                self._is_silent = True

    def _submit(self) -> None:
        rng, number = self._rng, len(self.generations)
        sampling = Sampling(max_tokens=8, n=2, prompt_logprobs=0 if rng.random() < 0.2 else None)
        request = ResolvedRequest(f"r{number}", "anna", [5] * rng.choice((4, 4, 60, 70)), sampling, number, 8)
        made = tuple(Generation(request) for _ in self._both)
        for generation, each in zip(made, self._both, strict=True):
            each.router.submit(generation)
        self.generations.append(made)

    def _cancel(self, generations: tuple[Generation, ...], candidate: int | None) -> None:
        for generation, each in zip(generations, self._both, strict=True):
            if candidate is None:
                each.router.cancel(generation)
            else:
                each.router.cancel_candidate(generation, candidate)

    def _pass_time(self) -> None:
        for each in self._both:
            each.pass_time()
        if not self._is_silent:
            report = HUNG if self._rng.random() < 0.01 else self._rng.choice(REPORTS)
            self._say(pong=runner_pb2.Pong(engine=report))

    def _step(self) -> runner_pb2.StepOutput:
        """Tokens, beams, a prompt or a refusal, for the newest attempt of a request or the one before."""
        rng, generation = self._rng, self._rng.choice(self.generations)[0]
        which = {"request": generation.number, "attempt": max(0, generation.attempt - (rng.random() < 0.2))}
        if rng.random() < 0.1:
            code = rng.choice((runner_pb2.Refusal.CODE_DRAINING, runner_pb2.Refusal.CODE_INVALID))
            refusal = runner_pb2.Refusal(code=code, field="prompt", detail="too long")
            return runner_pb2.StepOutput(outputs=[runner_pb2.SequenceOutput(**which, refusal=refusal)])
        step = runner_pb2.StepOutput()
        if generation.needs_prompt_logprobs and rng.random() < 0.9:
            count = len(generation.request.prompt_token_ids) - 1
            step.prompts.add(**which, logprobs=[types_pb2.TokenLogprobs(logprob=-1.0)] * count)
        if rng.random() < 0.1:
            step.beams.add(**which, beams=[runner_pb2.BeamOutput.Beam(token_ids=[1], score=-1.0)])
        for candidate in rng.sample((0, 1), rng.choice((1, 2))):
            position = max(0, len(generation.token_ids[candidate]) + rng.choice((0, 0, 0, 0, 0, -1, 1)))
            reason = rng.choice((None, None, None, FinishReason.STOP, FinishReason.LENGTH))
            usage = types_pb2.Usage(cached_tokens=3, recomputed_tokens=2) if rng.random() < 0.3 else None
            step.outputs.add(
                **which,
                candidate=candidate,
                position=position,
                token_ids=rng.choices(range(100), k=rng.choice((1, 1, 2))),
                finish_reason=None if reason is None else reason.value,
                usage=usage,
            )
        return step

    def _say(self, **message: Any) -> None:
        for each in self._both:
            each.say(runner_pb2.ServeResponse(**message))


async def _compare(seed: int, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Over a whole history; returns what the router was told of."""
    real, simulated = Real(monkeypatch), Simulated()
    script = _Script(random.Random(seed), (real, simulated))
    for _ in range(150):
        script.act()
        for each in (real, simulated):
            await each.settle()
        assert real.router.told == simulated.router.told, f"seed {seed}"
        assert real.sent == simulated.sent, f"seed {seed}"
        assert real.is_connected == simulated.is_connected, f"seed {seed}"
        for ours, theirs in script.generations:
            assert ours.token_ids == theirs.token_ids, f"seed {seed}"
            assert ours.stream.open == theirs.stream.open, f"seed {seed}"
    await real.close()
    return {told.split()[0] for told in real.router.told}


async def test_the_simulated_link_talks_like_the_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with capture_logs():
        kinds = [await _compare(seed, monkeypatch) for seed in range(40)]
    tokens = {"take_tokens", "take_prompt_logprobs", "take_beams"}
    assert set().union(*kinds) == {"ready", "report", "drain", "lose", "refuse"} | tokens
