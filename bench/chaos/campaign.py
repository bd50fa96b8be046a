"""One campaign: a server under `pagekeeper up`, clients, and one fault after another."""

import asyncio
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.chaos.faults import Plan, Signal, draw
from bench.chaos.figures import Strike, health_figures, missed_tokens, pauses, recomputed
from bench.chaos.load import Load
from bench.chaos.monkey import HANG_LIMIT_S, Monkey
from bench.chaos.observer import POLL_S, Observer
from bench.chaos.processes import Footprint, children, footprint
from bench.chaos.report import Report, pause_of
from bench.chaos.stock import count_streams, settle
from bench.chaos.waiting import NoRecoveryError
from bench.chaos.workload import Prompt
from bench.reference import Reference
from pagekeeper.cli.server import Server, ServerFailedError
from pagekeeper.common.errors import PagekeeperError

_GROWTH_FROM = 20
_WARM_UP_LIMIT_S = 120.0
"""For a standby; the runner is stopped for so long."""
_MOST_ROWS = 128

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Campaign:
    """What is done to which server, and under which load.

    Attributes:
        pause_bound_s: see `Report`.
    """

    name: str
    plan: Plan
    num_slots: int = 16
    standby: bool = False
    pause_bound_s: float | None = None

    @property
    def processes(self) -> set[str]:
        """Of the server."""
        return {"manager", "runner", "gateway"} | ({"standby"} if self.standby else set())

    @property
    def survivors(self) -> set[str]:
        """Those that nothing kills; of two runners none is sure to live."""
        killed = {process for process, kind in self.plan.targets if kind is not Signal.STOP}
        return self.processes - killed - ({"runner", "standby"} if killed & {"runner", "standby"} else set())

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the server.

        Where a runner lives on, its steps are small: oneDNN keeps what it has compiled for each number of rows, which
        would hide other growth; so few numbers can all be tried at the start.
        """
        variables = {}
        if any(kind is Signal.HANG for _, kind in self.plan.targets):
            variables["PAGEKEEPER_HANG_LIMIT_S"] = f"{HANG_LIMIT_S:g}"
        if "runner" in self.survivors:
            variables["PAGEKEEPER_MAX_BATCH_TOKENS"] = f"{_MOST_ROWS}"
        if self.warms_up and self.standby:
            variables["PAGEKEEPER_HANG_LIMIT_S"] = f"{_WARM_UP_LIMIT_S:g}"
        return variables

    @property
    def warms_up(self) -> bool:
        """Whether runners live through it, and so many faults that growth can be judged."""
        return "runner" in self.survivors and self.plan.count > _GROWTH_FROM

    @property
    def keeps_the_pool(self) -> bool:
        """Whether no cache manager dies."""
        return "manager" in self.survivors

    @property
    def keeps_requests(self) -> bool:
        """Whether no gateway dies: its requests end with it, and clients make new ones."""
        return "gateway" in self.survivors


@dataclass(frozen=True)
class Setting:
    """On what campaigns run.

    Attributes:
        model: directory.
        reference: the same model, loaded only if some stream differs.
        prompts: the workload.
        pool_size: such as 64MiB.
        environment: variables of the server.
        folder: where its logs go.
    """

    model: Path
    reference: Reference
    prompts: Sequence[Prompt]
    pool_size: str
    environment: dict[str, str]
    folder: Path


def run(campaign: Campaign, setting: Setting, seed: int, tell: Tell) -> Report:
    """Run a campaign, from its server's start to its stop.

    To be called on a thread that lives as long as the campaign: the server ends with the thread that started it.

    Args:
        campaign: what to do.
        setting: on what.
        seed: of all faults.
        tell: is told how far it is.
    """
    began = time.monotonic()
    report = Report(campaign.name, f"{seed}/{campaign.name}", campaign.num_slots, campaign.standby)
    report.pause_bound_s = campaign.pause_bound_s
    flags = ["--pool-size", setting.pool_size, *(["--standby"] if campaign.standby else [])]
    log = setting.folder / f"{campaign.name.replace(' ', '-')}.log"
    environment = setting.environment | campaign.environment
    try:
        with Server("--model", str(setting.model), *flags, log=log, environment=environment) as server:
            asyncio.run(_Run(campaign, setting, server, report, tell).run())
            if code := server.stop():
                report.left.append(f"pagekeeper up ended with code {code}")
    except ServerFailedError as error:
        report.broken = str(error)
    except subprocess.TimeoutExpired:
        report.left.append("pagekeeper up did not stop")
    report.seconds = time.monotonic() - began
    return report


class _Run:
    """A campaign under way."""

    def __init__(self, campaign: Campaign, setting: Setting, server: Server, report: Report, tell: Tell) -> None:
        self._campaign = campaign
        self._setting = setting
        self._server = server
        self._report = report
        self._tell = tell
        self._load = Load(server.address, setting.prompts, campaign.num_slots)
        self._observer = Observer(server.address, server.admin)
        self._monkey = Monkey(server.pid, campaign.processes, self._load, self._observer)
        self._strikes: list[Strike] = []
        self._lengths = [len(prompt.token_ids) for prompt in setting.prompts]

    async def run(self) -> None:
        """Do it all, and fill the report."""
        async with self._load:
            watch = asyncio.create_task(self._observer.watch_health())
            try:
                await self._monkey.until_up("at the start")
                await self._load.expect()
                if self._campaign.warms_up:
                    await self._load.try_lengths(_MOST_ROWS)
                    if self._campaign.standby:
                        await self._monkey.while_stopped("runner", self._load.try_lengths(_MOST_ROWS))
                await self._strike_all()
            except (NoRecoveryError, ProcessLookupError, TimeoutError, PagekeeperError) as error:
                self._report.broken = f"{type(error).__name__}: {error}"
            finally:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)
        self._take_stock()

    async def _strike_all(self) -> None:
        """Strike until so many faults have hit live streams as planned."""
        count = self._campaign.plan.count
        early: dict[str, Footprint] = {}
        self._load.start()
        await self._monkey.until_all_run("at the start")
        for fault in draw(self._campaign.plan, self._report.seed):
            await asyncio.sleep(fault.wait_s)
            strike = await self._monkey.strike(fault)
            if strike.num_live:
                self._strikes.append(strike)
            self._tell_progress()
            if len(self._strikes) == count:
                break
            if len(self._strikes) == _GROWTH_FROM and not early:
                await self._settle()
                early = self._footprints()
                self._load.start()
                await self._monkey.until_all_run("after a pause")
        await self._settle()
        if early:
            now = self._footprints()
            self._report.growth = {name: now[name] - early[name] for name in early}

    async def _settle(self) -> None:
        await self._load.drain()
        self._report.left += await settle(self._observer)
        self._report.block_size = (await self._observer.stats())["pool"]["block_size"]

    def _footprints(self) -> dict[str, Footprint]:
        pids = children(self._server.pid)
        return {name: footprint(pids[name]) for name in sorted(self._campaign.survivors)} | {
            "up": footprint(self._server.pid)
        }

    def _take_stock(self) -> None:
        report, streams, strikes = self._report, self._load.streams, self._strikes
        count_streams(report, streams, self._load.expected, self._setting.prompts, self._setting.reference)
        report.faults = dict(Counter(f"{strike.fault.signal} {strike.fault.process}" for strike in strikes))
        report.num_bystanders = self._monkey.num_bystanders
        report.pause = pause_of(pauses(strikes, streams))
        answers = self._observer.answers
        report.health = health_figures(strikes, answers, time.monotonic(), tolerance_s=2 * POLL_S)
        if self._campaign.keeps_the_pool and not report.broken:
            report.missed_tokens = missed_tokens(strikes)
            if self._campaign.keeps_requests:
                report.recomputed = recomputed(strikes, streams, report.block_size, self._lengths)

    def _tell_progress(self) -> None:
        streams = self._load.streams
        whole = sum(stream.is_whole for stream in streams)
        lost = sum(bool(stream.error) for stream in streams)
        count = f"{len(self._strikes)} of {self._campaign.plan.count} faults"
        self._tell(f"{self._campaign.name}: {count}, {whole} streams whole, {lost} lost")
