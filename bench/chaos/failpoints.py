"""A pass over all failpoints: at each, the process that comes there dies or stops, while streams run."""

import asyncio
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.chaos.campaign import Setting, Tell
from bench.chaos.cut import Cut
from bench.chaos.faults import Signal
from bench.chaos.load import Load
from bench.chaos.observer import Observer
from bench.chaos.report import Report
from bench.chaos.stack import Stack
from bench.chaos.stock import count_streams, settle
from bench.chaos.waiting import NoRecoveryError, until
from pagekeeper.common.errors import PagekeeperError
from pagekeeper.common.failpoints import NAMES

_HOLD_S = (0.2, 3.0)
_FEW, _SOME, _MANY = (1, 3), (3, 20), (5, 60)
_PASSES = {
    "runner.before_seal": _SOME,
    "runner.after_seal": _MANY,
    "runner.after_emit": _MANY,
    "manager.before_apply": _MANY,
    "manager.after_apply": _MANY,
    "gateway.after_tokens": _MANY,
    "gateway.after_emit": _MANY,
    "runner.mid_copy": _FEW,
    "runner.mid_release": _FEW,
    "gateway.before_submit": _FEW,
}
"""At which pass to act, least and most; of all others, at the first."""


@dataclass(frozen=True)
class Visit:
    """What is to happen at a failpoint."""

    name: str
    signal: Signal
    number: int
    hold_s: float

    @property
    def process(self) -> str:
        """Which one it happens to."""
        return self.name.partition(".")[0]

    @property
    def failpoints(self) -> str:
        """For the process's environment."""
        return f"{self.name}={self.signal}@{self.number}"


def visits(signals: Sequence[Signal], seed: str) -> list[Visit]:
    """Every failpoint once with each signal, in random order and at random passes."""
    rng = random.Random(seed)
    drawn = [
        Visit(name, kind, rng.randint(*_PASSES.get(name, (1, 1))), rng.uniform(*_HOLD_S))
        for kind in signals
        for name in NAMES
    ]
    return rng.sample(drawn, len(drawn))


def run(signals: Sequence[Signal], setting: Setting, num_slots: int, seed: int, tell: Tell) -> Report:
    """Visit every failpoint, from a start of three processes to their stop."""
    began = time.monotonic()
    report = Report("failpoints", f"{seed}/failpoints", num_slots, standby=False)
    asyncio.run(_run(visits(signals, report.seed), setting, report, tell))
    report.seconds = time.monotonic() - began
    return report


async def _run(planned: list[Visit], setting: Setting, report: Report, tell: Tell) -> None:
    log = setting.folder / "failpoints.log"
    async with Stack(setting.model, setting.pool_size, log, setting.environment) as stack, Cut() as cut:
        for name in ("manager", "gateway", "runner"):
            await stack.start(name)
            await stack.until_ready(name)
        observer = Observer(stack.gateway, stack.admin)
        async with Load(stack.gateway, setting.prompts, report.num_slots) as load:
            try:
                await load.expect()
                load.start()
                for visit in planned:
                    await _visit(visit, stack, cut)
                    report.faults[f"{visit.signal} {visit.name}"] = 1
                    tell(f"failpoints: {len(report.faults)} of {len(planned)}, the last {visit.failpoints}")
                await _start_missing(stack)
                await load.drain()
                report.left += await settle(observer)
            except (NoRecoveryError, PagekeeperError) as error:
                report.broken = f"{type(error).__name__}: {error}"
        codes = await stack.stop()
        report.left += [f"the {name} ended with code {code}" for name, code in codes.items() if code]
    count_streams(report, load.streams, load.expected, setting.prompts, setting.reference)


async def _visit(visit: Visit, stack: Stack, cut: Cut) -> None:
    """Have a process with this failpoint go on with the streams in the place of the one that runs, until it acts."""
    await _start_missing(stack, but=visit.process)
    await stack.kill(visit.process)
    if visit.name == "runner.mid_reattach":
        await stack.until_ready("manager")
        await cut.put_before(stack.runtime_dir.cache_socket)
    await stack.start(visit.process, failpoints=visit.failpoints)
    if visit.name == "runner.mid_reattach":
        await stack.until_ready("runner")
        cut.cut()
    if visit.name == "manager.mid_release":
        await _until_attached(stack)
        await stack.kill("runner")
    if visit.signal is Signal.STOP:
        await stack.pause(visit.process, visit.hold_s)
    elif (code := await stack.ended(visit.process)) != -signal.SIGKILL:
        raise NoRecoveryError(f"the {visit.process} ended with code {code}, not at {visit.failpoints}")


async def _start_missing(stack: Stack, but: str = "") -> None:
    for name in ("manager", "runner", "gateway"):
        if name != but and not stack.runs(name):
            await stack.start(name)


async def _until_attached(stack: Stack) -> None:
    await stack.until_ready("manager")
    observer = Observer(stack.gateway, stack.admin)

    async def is_attached() -> bool:
        return bool(await observer.runners())

    await until(is_attached, "the runner is attached")
