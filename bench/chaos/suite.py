"""Which campaigns there are: the full counts for `make chaos`, few for `make accept`."""

from bench.chaos.campaign import Campaign
from bench.chaos.faults import Plan, Signal

NUM_SEEDS = 20_000
STANDBY_BOUND_S = {1: 0.3, 16: 0.8}
RESTART_BOUND_S = 6.0
# Longer than the supervisor takes a child for settled: it starts that again at once.
_SETTLED_S = (10.5, 11.5)
# Longer than a gateway waits for a Pong, for the most part: the streams go on elsewhere before the runner wakes up.
_LOST_S = (1.2, 2.5)


def full(share: float = 1.0) -> list[Campaign]:
    """What is promised, with the counts that it is promised for, or with a share of them."""

    def few(count: int) -> int:
        return max(3, round(share * count))

    return [
        takeover(few(200), num_slots=16),
        takeover(few(30), num_slots=1),
        restart(few(20), num_slots=16),
        restart(few(10), num_slots=1),
        kills("gateway", few(100)),
        kills("manager", few(100)),
        # A runner that wakes up finds its streams gone: two continuations of each, of which one must be dropped.
        Campaign("runner stopped, standby", Plan((("runner", Signal.STOP),), few(200), hold_s=_LOST_S), standby=True),
        stops("runner", few(50)),
        stops("standby", few(50)),
        stops("gateway", few(50)),
        stops("manager", few(50)),
        hangs(few(9)),
    ]


def takeover(count: int, num_slots: int) -> Campaign:
    """SIGKILL of the runner that has the streams, where a standby is ready."""
    plan = Plan((("runner", Signal.KILL),), count)
    name = f"runner killed, standby, {_streams(num_slots)}"
    return Campaign(name, plan, num_slots, standby=True, pause_bound_s=STANDBY_BOUND_S[num_slots])


def restart(count: int, num_slots: int) -> Campaign:
    """SIGKILL of the only runner."""
    plan = Plan((("runner", Signal.KILL),), count, wait_s=_SETTLED_S)
    return Campaign(f"runner killed, {_streams(num_slots)}", plan, num_slots, pause_bound_s=RESTART_BOUND_S)


def kills(process: str, count: int) -> Campaign:
    """SIGKILL of one process, without a standby."""
    return Campaign(f"{process} killed", Plan(((process, Signal.KILL),), count))


def stops(process: str, count: int) -> Campaign:
    """SIGSTOP and SIGCONT of one process; without a standby, unless that is the one."""
    return Campaign(f"{process} stopped", Plan(((process, Signal.STOP),), count), standby=process == "standby")


def hangs(count: int) -> Campaign:
    """Each process stops in turn, and never goes on: the supervisor ends it, and nothing else."""
    targets = tuple((process, Signal.HANG) for process in ("runner", "gateway", "manager"))
    return Campaign("each process hangs", Plan(targets, count))


def _streams(count: int) -> str:
    return "1 stream" if count == 1 else f"{count} streams"
