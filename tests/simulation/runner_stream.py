"""`gateway.runner_stream` on the simulated network: the edge of the real link to a runner."""

from collections.abc import Callable

from gateway.liveness import PING_INTERVAL_S
from gateway.router import Router
from gateway.runner_link import RunnerLink, RunnerLostError
from pagekeeper.v1 import runner_pb2
from tests.simulation.network import End, Network
from tests.simulation.process import Process


class RunnerStream:
    """From the try to connect until the runner is lost.

    Args:
        network: the network.
        process: the gateway.
        router: its router.
        runner: the runner's name.
        on_change: is called when the router has been told something.
        on_lost: is called once, with whether that was the loss of a runner that was ready and did not drain.
    """

    def __init__(
        self,
        network: Network,
        process: Process,
        router: Router,
        runner: str,
        on_change: Callable[[], None],
        on_lost: Callable[[bool], None],
    ) -> None:
        self._process = process
        self._router = router
        self._runner = runner
        self._on_change = on_change
        self._on_lost = on_lost
        self._is_lost = False
        self._end: End
        self._link: RunnerLink
        network.connect(process, runner, "serve", self._set_up)

    def _set_up(self, end: End) -> None:
        self._end = end
        self._link = RunnerLink(self._router, end.send, self._note_ready)
        end.on_message = self._take
        end.on_end = self._lose
        self._ping()

    def _note_ready(self, _: str) -> None:
        self._process.world.note(self._process.name, "sees", self._runner)

    def _ping(self) -> None:
        if not self._is_lost:
            try:
                self._link.ping()
            except RunnerLostError:
                self._lose()
            else:
                self._process.after(PING_INTERVAL_S, self._ping)

    def _take(self, message: runner_pb2.ServeResponse) -> None:
        try:
            self._link.take(message)
        except RunnerLostError:
            self._lose()
        self._on_change()

    def _lose(self) -> None:
        if not self._is_lost:
            self._is_lost = True
            num_left = self._link.lose()
            self._end.close()
            if self._link.was_ready:
                self._process.world.note(self._process.name, "loses", self._runner, "with", num_left)
            self._on_change()
            self._on_lost(self._link.was_ready and not self._link.is_draining)
