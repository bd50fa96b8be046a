"""`gateway.runner_link`: one stream to one runner, as the router's `Link`.

`test_simulated_runner_link.py` compares it with the real one.
"""

from collections.abc import Callable, Sequence

from gateway.generation import Generation
from gateway.liveness import PING_INTERVAL_S, Liveness, has_manager, is_hung
from gateway.router import Router
from gateway.runner_wire import from_hello, to_beams, to_cache_use, to_error, to_submit, to_tokens
from pagekeeper.v1 import runner_pb2
from tests.simulation.network import End, Network
from tests.simulation.process import Process
from tests.simulation.world import Violation


class RunnerLink:
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
        self._end: End
        self._hello: runner_pb2.RunnerHello | None = None
        self._liveness = Liveness()
        self._nonce = 0
        self._was_ready = False
        self._is_lost = False
        self._is_draining = False
        network.connect(process, runner, "serve", self._set_up)

    def submit(self, generation: Generation, max_tokens: int) -> None:
        """See `Link`."""
        self._end.send(runner_pb2.ServeRequest(submit=to_submit(generation, max_tokens)))

    def cancel(self, number: int, candidates: Sequence[int] = ()) -> None:
        """See `Link`."""
        cancel = runner_pb2.Cancel(request=number, candidates=candidates)
        self._end.send(runner_pb2.ServeRequest(cancel=cancel))

    def _set_up(self, end: End) -> None:
        self._end = end
        end.on_message = self._take
        end.on_end = self._lose
        self._ping()

    def _ping(self) -> None:
        if self._is_lost:
            return
        if self._liveness.is_lost:
            self._lose()
            return
        self._liveness.ping()
        self._nonce += 1
        self._end.send(runner_pb2.ServeRequest(ping=runner_pb2.Ping(nonce=self._nonce)))
        self._process.after(PING_INTERVAL_S, self._ping)

    def _lose(self) -> None:
        if not self._is_lost:
            self._is_lost = True
            num_left = self._router.lose(self)
            self._end.close()
            if self._was_ready:
                self._process.world.note(self._process.name, "loses", self._runner, "with", num_left)
            self._on_change()
            self._on_lost(self._was_ready and not self._is_draining)

    def _take(self, message: runner_pb2.ServeResponse) -> None:
        match message.WhichOneof("message"):
            case "hello":
                self._hello = message.hello
            case "pong":
                self._take_pong(message.pong.engine)
            case "draining":
                self._is_draining = True
                self._router.drain(self)
            case "step":
                self._take_step(message.step)
        self._on_change()

    def _take_pong(self, engine: runner_pb2.EngineReport) -> None:
        if is_hung(engine) or self._hello is None:
            self._lose()
            return
        self._liveness.pong()
        if self._is_draining and not self._was_ready:
            return
        if not self._was_ready:
            self._was_ready = True
            self._process.world.note(self._process.name, "sees", self._runner)
            self._router.ready(self, from_hello(self._hello))
        self._router.report(self, has_manager=has_manager(engine))

    def _take_step(self, step: runner_pb2.StepOutput) -> None:
        for prompt in step.prompts:
            self._router.take_prompt_logprobs(self, prompt.request, prompt.attempt, prompt.logprobs)
        for output in step.outputs:
            self._take_output(output)
        for search in step.beams:
            self._router.take_beams(self, search.request, search.attempt, to_beams(search))

    def _take_output(self, output: runner_pb2.SequenceOutput) -> None:
        if output.HasField("refusal"):
            self._router.refuse(self, output.request, output.attempt, to_error(output.refusal))
            return
        before = self._known_to_others(output)
        tokens, use = to_tokens(output), to_cache_use(output)
        self._router.take_tokens(self, output.request, output.attempt, output.position, tokens, use)
        if before is not None and before != self._known_to_others(output):
            raise Violation(f"{self._process.name} takes {tokens} of attempt {output.attempt}, which is over")

    def _known_to_others(self, output: runner_pb2.SequenceOutput) -> list[list[int]] | None:
        """Every token of the answer, if this output is of an attempt that is over."""
        place = self._router._places.get(output.request)
        if place is None or (place.runner is not None and place.generation.attempt == output.attempt):
            return None
        return [token_ids.copy() for token_ids in place.generation.token_ids.values()]
