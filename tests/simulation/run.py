"""One seed, from the first process to the last check."""

import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from tests.simulation.gateway import Gateway
from tests.simulation.host import Host
from tests.simulation.runner import Runner
from tests.simulation.scenario import scenario
from tests.simulation.world import Violation, World

_LONGEST_S = 30.0
"""In this time from the last fault on, every request has ended, whatever has happened before."""
_QUIET_S = 8.0
"""In this time from the end of the last request on, everything has been given back."""


@dataclass(frozen=True)
class Report:
    """What became of a seed.

    Attributes:
        violation: what went wrong, if anything did.
        checksum: of everything that happened.
        seconds: of simulated time.
        num_requests: of clients.
        num_streams: over which they got their answers.
        num_bounded: sequences that went on elsewhere, with the bound of what is computed again in force.
        faults: what went wrong, by kind.
        text: what went before the violation.
    """

    seed: int
    violation: str | None
    checksum: int
    seconds: float
    num_requests: int
    num_streams: int
    num_bounded: int
    faults: Counter[str]
    text: tuple[str, ...]

    def __str__(self) -> str:
        replay = f"replay: python -m tests.simulation --first {self.seed} --seeds 1 --trace"
        return "\n".join((*self.text, f"seed {self.seed}: {self.violation or 'fine'}", replay))


def run(seed: int, echo: Callable[[str], None] | None = None) -> Report:
    """Simulate a seed."""
    world = World(seed, echo)
    drawn = scenario(seed)
    host = Host(world, drawn)
    violation = None
    try:
        host.start()
        _let_end(host)
    except Exception as error:  # noqa: BLE001 - whatever the code under test raises is a finding
        violation = f"{type(error).__name__}: {error}"
        if not isinstance(error, Violation):
            violation = traceback.format_exc()
    text = () if violation is None else (*drawn.lines(), *world.trace.lines())
    return Report(
        seed=seed,
        violation=violation,
        checksum=world.trace.checksum,
        seconds=world.now,
        num_requests=len(drawn.requests),
        num_streams=sum(client.num_streams for client in host.clients.values()),
        num_bounded=host.recomputation.num_checked,
        faults=host.faults,
        text=text,
    )


def _let_end(host: Host) -> None:
    world = host.world
    world.run(host.scenario.calm_at, lambda: False)
    if not world.run(world.now + _LONGEST_S, lambda: host.num_open == 0):
        open_ = [client.name for client in host.clients.values() if not client.has_ended]
        raise Violation(f"{', '.join(open_)} still without an answer {_LONGEST_S:g} s after the last fault")
    deadline = world.now + _QUIET_S
    while (leftovers := what_is_left(host)) is not None:
        if world.now > deadline:
            raise Violation(f"{_QUIET_S:g} s after the last request {leftovers}")
        world.run(world.now + _QUIET_S / 16, lambda: False)
    host.manager.audit()


def what_is_left(host: Host) -> str | None:
    """Who still holds anything, when nobody should any more."""
    for process in host.processes:
        if process.is_stopped or not process.is_alive:
            return f"{process.name} does not run"
        if isinstance(process, (Runner, Gateway)) and process.holds:
            return f"{process.name} holds {process.holds}"
    policy = host.manager.policy
    stats = policy.stats()
    if stats.pool.free_blocks != host.scenario.pool.num_blocks - 1 or stats.usage.sequences:
        return f"not all blocks are free: {stats.pool}, {stats.usage}"
    if len(stats.sessions) != len(host.runners):
        return f"{len(host.runners)} runners live, with these sessions: {stats.sessions}"
    for session in policy.sessions():
        if session.sequences or session.waiting_opens or session.held_blocks:
            return f"a session keeps something: {session}"
    return None
