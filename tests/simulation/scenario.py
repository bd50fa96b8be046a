"""What a seed stands for: which processes, which requests, which faults."""

import random
from dataclasses import dataclass

from model_runner.beam_group import most_blocks
from model_runner.dispatch import RunnerInfo
from model_runner.scheduler import SchedulerLimits
from model_runner.submission import RequestLimits
from pagekeeper.v1 import runner_pb2
from tests.simulation.gateway import GatewaySettings
from tests.simulation.manager import MANAGER, TENANTS, PoolSettings
from tests.simulation.model import VOCABULARY
from tests.simulation.requests import Request
from tests.simulation.runner import RunnerSettings

_BLOCK_SIZE = 8
_STRIKES = {"kill": 5, "stop": 3, "break": 3, "drain": 2, "retire": 1, "replace": 1, "disconnect": 1, "leave": 1}
"""What can happen to a process or a client, and how often it does beside the others."""
_WEATHER = ("slow network", "slow device", "rounding")


@dataclass(frozen=True)
class Strike:
    """Something that happens to somebody.

    Attributes:
        time: not before then.
        effects: and so many effects of the process later; 0: at once.
        lasts_s: of a stop.
    """

    time: float
    kind: str
    target: str
    effects: int
    lasts_s: float


@dataclass(frozen=True)
class Scenario:
    """A seed's beginning; what happens then, the world's `random` decides."""

    seed: int
    pool: PoolSettings
    runners: dict[str, RunnerSettings]
    gateways: dict[str, GatewaySettings]
    requests: list[Request]
    strikes: list[Strike]
    faults: frozenset[str]
    usual_delay_s: float
    slow_delay_s: float
    calm_at: float
    """From then on nothing goes wrong any more."""

    def lines(self) -> list[str]:
        """For whoever reads a failure."""
        facts = [f"seed {self.seed}, calm at {self.calm_at:.2f} s, faults: {', '.join(sorted(self.faults)) or 'none'}"]
        facts += [f"pool: {self.pool}"]
        facts += [f"{name}: {settings}" for name, settings in (*self.runners.items(), *self.gateways.items())]
        facts += [str(request) for request in self.requests]
        return [*facts, *map(str, self.strikes)]


def scenario(seed: int) -> Scenario:
    """Draw one."""
    rng = random.Random(seed)
    # Each seed has some kinds of faults only: what another kind would hide is seen.
    faults = frozenset(fault for fault in (*_STRIKES, *_WEATHER) if rng.random() < 0.4)
    calm_at = rng.uniform(0.4, 1.5)
    pool = _pool(rng)
    runners = _runners(rng, pool, faults)
    gateways = {
        f"gateway-{i + 1}": GatewaySettings(tuple(runners), 2.0, rng.choice((2, 4, 64)), 4, 2.0)
        for i in range(rng.choice((1, 1, 2)))
    }
    requests = _requests(rng, pool, runners, calm_at)
    return Scenario(
        seed=seed,
        pool=pool,
        runners=runners,
        gateways=gateways,
        requests=requests,
        strikes=_strikes(rng, faults, [MANAGER, *runners, *gateways], requests, calm_at),
        faults=faults,
        usual_delay_s=rng.choice((0.0002, 0.002, 0.01)),
        slow_delay_s=rng.choice((0.05, 0.4)),
        calm_at=calm_at,
    )


def _pool(rng: random.Random) -> PoolSettings:
    return PoolSettings(
        num_blocks=rng.choice((6, 7, 8, 9, 10, 12, 14, 16, 24, 60)),
        block_size=_BLOCK_SIZE,
        watermark=rng.choice((0.01, 0.1)),
        outlived_by_device_work=rng.random() < 0.4,
        settle_s=0.3,
        audit_share=0.05,
    )


def _runners(rng: random.Random, pool: PoolSettings, faults: frozenset[str]) -> dict[str, RunnerSettings]:
    num_blocks = _most_blocks(pool)
    limits = SchedulerLimits(_BLOCK_SIZE, rng.choice((4, 8, 16, 32)), rng.choice((1, 2, 4, 8)))
    requests = RequestLimits(VOCABULARY, num_blocks * _BLOCK_SIZE, _BLOCK_SIZE, num_blocks, limits.max_sequences)
    slow_step_s = rng.choice((0.1, 0.6))
    kinds = rng.choice(
        (
            [("BOTH", False)],
            [("BOTH", False), ("BOTH", False)],
            [("BOTH", False), ("BOTH", True)],
            [("PREFILL", False), ("DECODE", False)],
            [("PREFILL", False), ("DECODE", False), ("BOTH", True)],
        )
    )
    infos = (
        RunnerInfo(f"runner-{i}", "", requests, runner_pb2.Role.Value(f"ROLE_{role}"), is_standby)
        for i, (role, is_standby) in enumerate(kinds, start=1)
    )
    return {
        info.runner_id: RunnerSettings(
            info=info,
            limits=limits,
            step_s=rng.choice((0.005, 0.02, 0.06)),
            slow_step_s=slow_step_s,
            slow_step_share=0.05 if "slow device" in faults else 0.0,
            step_limit_s=0.3,
            rounds="rounding" in faults,
            outlives_s=0.9 * pool.settle_s if pool.outlived_by_device_work else 0.0,
        )
        for info in infos
    }


def _most_blocks(pool: PoolSettings) -> int:
    """Of one sequence."""
    return pool.num_blocks - 1 - max(1, int(pool.num_blocks * pool.watermark))


def _requests(
    rng: random.Random, pool: PoolSettings, runners: dict[str, RunnerSettings], calm_at: float
) -> list[Request]:
    limit = _most_blocks(pool) * _BLOCK_SIZE
    most_sequences = next(iter(runners.values())).limits.max_sequences
    beginnings = [tuple(rng.choices((1, 2, 3), k=40)) for _ in range(rng.choice((1, 2)))]
    tenants = TENANTS if rng.random() < 0.2 else TENANTS[:1]
    requests = []
    for number in range(rng.randint(2, 6)):
        length = rng.randint(1, min(40, limit - 1))
        prompt = rng.choice(beginnings)[:length]
        if rng.random() < 0.4:
            prompt = prompt[: rng.randint(0, length)]
            prompt += tuple(rng.choices((1, 2, 3), k=length - len(prompt)))
        max_tokens = min(rng.randint(1, 32), limit - length)
        width, candidates = 0, rng.choice((1, 1, 1, 1, 2, 3))
        if rng.random() < 0.12:
            width = min(rng.choice((1, 2, 3)), most_sequences)
            while most_blocks(width, length, length + max_tokens, _BLOCK_SIZE) > _most_blocks(pool):
                width -= 1
            candidates = rng.randint(1, max(width, 1))
        requests.append(
            Request(
                request_id=f"r{number + 1}",
                tenant=rng.choice(tenants),
                prompt=prompt,
                max_tokens=max_tokens,
                seed=rng.randrange(1000),
                priority=rng.choice((0, 0, -1, 1)),
                num_candidates=candidates,
                beam_width=width,
                stop_word=0 if width else rng.choice((0, 0, 0, 4)),
                arrival_s=rng.choice((0.2, 0.2, rng.uniform(0.2, 0.4), rng.uniform(0.0, calm_at))),
                read_s=rng.choice((0.0, 0.0, 0.0, 0.0, 0.03, 2.5)),
            )
        )
    return requests


def _strikes(
    rng: random.Random, faults: frozenset[str], processes: list[str], requests: list[Request], calm_at: float
) -> list[Strike]:
    kinds = [kind for kind, weight in _STRIKES.items() for _ in range(weight) if kind in faults]
    if not kinds:
        return []
    strikes = []
    time = rng.uniform(0.0, calm_at)
    for _ in range(rng.choice((1, 2, 3, 5, 8))):
        kind = rng.choice(kinds)
        runners = [name for name in processes if name.startswith("runner")]
        if kind in ("disconnect", "leave"):
            target = rng.choice(requests).request_id
        elif kind in ("drain", "retire", "replace"):
            target = rng.choice(runners)
        else:
            # A runner's death is what there is the most to get wrong about.
            target = rng.choice((*processes, *runners))
        effects = rng.choice((0, 1, 2, 3, 5, 8, 13))
        strikes.append(Strike(time, kind, target, effects, rng.choice((0.05, 0.5, 2.0, 5.0))))
        # Often one comes upon the other: what is being recovered from is when more goes wrong than by chance.
        time = rng.choice((rng.uniform(0.0, calm_at), min(calm_at, time + rng.uniform(0.0, 0.1))))
    return sorted(strikes, key=lambda strike: strike.time)
