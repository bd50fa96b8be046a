"""Does faults to the processes of one server, and waits until it has got over each."""

import asyncio
import math
import signal
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace

from bench.chaos.faults import Fault, Signal
from bench.chaos.figures import Opens, Strike
from bench.chaos.load import Load
from bench.chaos.observer import Observer, Runner
from bench.chaos.processes import Process, children
from bench.chaos.waiting import RECOVERY_LIMIT_S, until

HANG_LIMIT_S = 3.0
"""The supervisor's, in campaigns with a hang; it waits longer by default."""
_DEATH_LIMIT_S = 5.0
_RUNNERS = ("runner", "standby")


class Monkey:
    """Hits one process at a time.

    Args:
        supervisor: pid of `pagekeeper up`.
        names: its processes.
        load: the clients.
        observer: of the same server.

    Attributes:
        num_bystanders: processes that did not live through a fault which was not theirs.
    """

    def __init__(self, supervisor: int, names: set[str], load: Load, observer: Observer) -> None:
        self._supervisor = supervisor
        self._names = names
        self._load = load
        self._observer = observer
        self.num_bystanders = 0

    async def strike(self, fault: Fault) -> Strike:
        """Do one fault; returns when everything is up again and every stream has gone on.

        Raises:
            NoRecoveryError: that does not happen.
            ProcessLookupError: a process ended that nothing had been done to.
            TryAgainError: the cache manager cannot be asked.
        """
        # Every answer is in the cache since the fault-free run; what a stream finds afterwards shall be its own.
        await self._observer.flush()
        opens, runners, before = await self._observer.opens(), await self._observer.runners(), self._children()
        pid = target(fault.process, before, runners)
        with Process(pid) as process:
            if pid not in self._children().values():
                raise ProcessLookupError(f"the {fault.process} has ended by itself")
            strike = Strike(
                fault=fault,
                at=time.monotonic(),
                num_live=self._load.num_live,
                sure_before=_sure_before(fault, pid, runners),
                has_stand_in=fault.process in _RUNNERS and len(runners) > 1,
            )
            await _do(fault, process)
        what = f"after a {fault.signal} of the {fault.process}"
        later, up_at = await asyncio.gather(self._opens_once_all_run(fault, what), self.until_up(what))
        await self.until_all_run(what)
        after = self._children()
        untouched = {name: other for name, other in before.items() if other != pid or fault.signal is Signal.STOP}
        self.num_bystanders += sum(after.get(name) != other for name, other in untouched.items())
        return replace(strike, up_at=up_at, opens=later and later - opens)

    async def while_stopped(self, process: str, work: Awaitable[None]) -> None:
        """Have this done while a process is stopped, with nothing in the cache."""
        await self._observer.flush()
        with Process(self._children()[process]) as stopped:
            stopped.send(signal.SIGSTOP)
            await work
        await self.until_up(f"after a pause of the {process}")

    async def until_up(self, when: str) -> float:
        """Wait until every process is there, every runner attached, and the gateway serves; returns that moment."""
        since = time.monotonic()

        async def is_up() -> bool:
            pids = self._children()
            if set(pids) != self._names or not self._observer.serves_since(since):
                return False
            attached = {runner.pid for runner in await self._observer.runners()}
            return attached == {pids[name] for name in pids.keys() & set(_RUNNERS)}

        # Each look costs the machine some milliseconds, which the takeover needs more.
        await until(is_up, f"everything is up {when}", poll_s=0.25)
        return time.monotonic()

    async def until_all_run(self, when: str) -> None:
        """Wait until every slot has a stream that has got tokens from now on."""
        since = time.monotonic()

        async def all_run() -> bool:
            return self._load.all_have_run_since(since)

        await until(all_run, f"every stream goes on {when}")

    async def _opens_once_all_run(self, fault: Fault, when: str) -> Opens | None:
        """The manager's statistics as soon as every stream has gone on; None: it is another manager."""
        await self.until_all_run(when)
        return None if fault.process == "manager" and fault.signal is not Signal.STOP else await self._observer.opens()

    def _children(self) -> dict[str, int]:
        return children(self._supervisor)


async def _do(fault: Fault, process: Process) -> None:
    match fault.signal:
        case Signal.KILL:
            process.send(signal.SIGKILL)
            await process.ended(_DEATH_LIMIT_S)
        case Signal.STOP:
            process.send(signal.SIGSTOP)
            await asyncio.sleep(fault.hold_s)
            process.send(signal.SIGCONT)
        case Signal.HANG:
            process.send(signal.SIGSTOP)
            await process.ended(HANG_LIMIT_S + RECOVERY_LIMIT_S)


def target(process: str, pids: Mapping[str, int], runners: Sequence[Runner]) -> int:
    """Which pid is meant: of two runners, "runner" is the one with the most sequences, and "standby" the other."""
    if process not in _RUNNERS:
        return pids[process]
    sequences = {runner.pid: runner.num_sequences for runner in runners}
    by_load = sorted((pids[name] for name in _RUNNERS if name in pids), key=lambda pid: -sequences.get(pid, 0))
    return by_load[0] if process == "runner" else by_load[-1]


def _sure_before(fault: Fault, pid: int, runners: Sequence[Runner]) -> float:
    """As in `Strike`: who began before another runner was there is not with that one."""
    if fault.process == "standby":
        return -math.inf
    if fault.process != "runner":
        return math.inf
    others = [runner for runner in runners if runner.pid != pid]
    return min((runner.attached_at for runner in others if runner.num_sequences), default=math.inf)
