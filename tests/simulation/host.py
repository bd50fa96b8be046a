"""The machine: starts the processes, starts again what dies, and is where faults happen."""

from collections import Counter
from collections.abc import Callable
from functools import partial

from tests.simulation.client import Client
from tests.simulation.gateway import Gateway
from tests.simulation.manager import MANAGER, Manager
from tests.simulation.network import Network, Stream
from tests.simulation.process import Process
from tests.simulation.recomputation import Recomputation
from tests.simulation.runner import Runner
from tests.simulation.scenario import Scenario, Strike
from tests.simulation.world import Violation, World

_RESTART_S = 0.1
_LOADING_S = 0.3
_HANG_LIMIT_S = 3.0
_GRACE_S = 1.0


class Host:
    """Everything of one scenario.

    Attributes:
        current: the processes that have a name now, dead ones until they are started again.
        former: runners that were replaced or drain beside their successor.
        num_open: requests without an answer.
        faults: what went wrong, by kind.
    """

    def __init__(self, world: World, scenario: Scenario) -> None:
        self.world = world
        self.scenario = scenario
        share = 0.05 if "slow network" in scenario.faults else 0.0
        self.network = Network(world, scenario.usual_delay_s, scenario.slow_delay_s, share)
        limits = next(iter(scenario.runners.values())).limits
        self.recomputation = Recomputation(limits.block_size, limits.max_batch_tokens)
        self.clients: dict[str, Client] = {}
        self.current: dict[str, Process] = {}
        self.former: list[Runner] = []
        self.num_open = len(scenario.requests)
        self.faults: Counter[str] = Counter()
        self.is_calm = False
        self._replaced: set[str] = set()
        """Names whose next bearer is on its way."""

    def start(self) -> None:
        """Start everything that is to run, and plan the faults."""
        for name in (MANAGER, *self.scenario.runners, *self.scenario.gateways):
            self._start(name)
        gateways, rounds = tuple(self.scenario.gateways), "rounding" in self.scenario.faults
        for request in self.scenario.requests:
            client = Client(self.network, request, gateways, self._client_ended, rounds=rounds)
            self.clients[request.request_id] = client
            client.after(request.arrival_s, client.start)
        for strike in self.scenario.strikes:
            self.world.at(strike.time, self._strike, strike)
        self.world.at(self.scenario.calm_at, self._calm_down)

    @property
    def processes(self) -> list[Process]:
        """Those that live, and those that are to be started again."""
        return [*self.current.values(), *self.former]

    @property
    def runners(self) -> list[Runner]:
        """Those that live."""
        return [each for each in self.processes if isinstance(each, Runner) and each.is_alive]

    @property
    def manager(self) -> Manager:
        """The newest one."""
        manager = self.current[MANAGER]
        if not isinstance(manager, Manager):
            raise Violation(f"{manager.name} is no cache manager")
        return manager

    def _client_ended(self, _: Client) -> None:
        self.num_open -= 1

    def _start(self, name: str) -> Process:
        process: Process
        if name == MANAGER:
            process = Manager(self.network, self.scenario.pool)
        elif name in self.scenario.gateways:
            process = Gateway(self.network, name, self.scenario.gateways[name])
        else:
            process = self._runner(name, partial(self.network.servers.__setitem__, name))
        self.current[name] = process
        self._launch(process)
        return process

    def _launch(self, process: Process) -> None:
        process.on_death = self._died
        self.world.note(process.name, "starts")
        process.start()

    def _runner(self, name: str, on_serving: Callable[[Runner], None]) -> Runner:
        return Runner(self.network, name, self.scenario.runners[name], self.recomputation, on_serving)

    def _died(self, process: Process) -> None:
        self.world.note(process.name, "is dead")
        self.network.process_died(process)
        if process in self.former:
            self.former.remove(process)
        elif self.current.get(process.name) is process:
            loading = _LOADING_S if isinstance(process, Runner) else 0.0
            self.world.after(_RESTART_S + loading * self.world.random.random(), self._restart, process)

    def _restart(self, process: Process) -> None:
        if self.current[process.name] is process:
            self._start(process.name)

    # -- faults

    def _strike(self, strike: Strike) -> None:
        if self.is_calm:
            return
        if strike.target in self.clients:
            self.faults[strike.kind] += 1
            client = self.clients[strike.target]
            client.run(client.leave if strike.kind == "leave" else client.break_off)
            return
        process = self.current[strike.target]
        if strike.effects and strike.kind in ("kill", "stop"):
            process.fuse = (strike.effects, partial(self._hit, strike))
        else:
            self._hit(strike, process)

    def _hit(self, strike: Strike, process: Process) -> None:
        if self.is_calm or not process.is_alive:
            return
        self.faults[strike.kind] += 1
        self.world.note("fault", strike.kind, process.name)
        match strike.kind:
            case "kill":
                process.kill()
            case "stop":
                process.stop()
                self.world.after(strike.lasts_s, process.go_on)
                self.world.after(_HANG_LIMIT_S, self._kill_if_stopped, process, self.world.now)
            case "break":
                own = [s for s, what in self.network.streams.items() if what != "handover" and _is_of(s, process)]
                if own:
                    stream = self.world.random.choice(own)
                    self.recomputation.is_bounded &= self.network.streams[stream] != "attach"
                    stream.lose()
            case "drain" | "retire" if isinstance(process, Runner):
                process.run(process.service.drain, _GRACE_S if strike.kind == "drain" else 0.0)
            case "replace" if isinstance(process, Runner):
                self._replace(process.name)

    @staticmethod
    def _kill_if_stopped(process: Process, since: float) -> None:
        """What the supervisor does with one that has not answered for so long."""
        if process.is_stopped and process.stopped_at == since:
            process.kill()

    def _replace(self, name: str) -> None:
        """`pagekeeper runner --replace`: the successor attaches beside the old one before that retires."""

        def ready(new: Runner) -> None:
            if self.current[name] is new:
                return
            old, self.current[name] = self.current[name], new
            if isinstance(old, Runner) and old.is_alive:
                self.former.append(old)
                old.run(old.service.drain, 0.0)
            self._take_over(old, new)

        if name not in self._replaced:
            self._replaced.add(name)
            self._launch(self._runner(name, ready))

    def _take_over(self, old: Process, new: Runner) -> None:
        """The new one serves when the old one has gone."""
        if old.is_alive and new.is_alive:
            self.world.after(0.01, self._take_over, old, new)
            return
        self._replaced.discard(new.name)
        if new.is_alive:
            self.network.servers[new.name] = new

    def _calm_down(self) -> None:
        """Nothing goes wrong from now on; who was stopped goes on."""
        self.world.note("host", "calm")
        self.is_calm = True
        self.network.calm()
        for process in (*self.current.values(), *self.former):
            process.fuse = None


def _is_of(stream: Stream, process: Process) -> bool:
    return process in (stream.client.process, stream.server.process)
