"""What a gateway and one runner say to each other, from the first word until the runner is lost.

Like the router it needs no event loop and no socket; `runner_stream.py` has these.
"""

from collections.abc import Callable, Sequence

from gateway.generation import Generation
from gateway.liveness import Liveness, has_manager, is_hung
from gateway.router import Router
from gateway.runner_wire import from_hello, to_beams, to_cache_use, to_error, to_submit, to_tokens
from pagekeeper.common.errors import BugError
from pagekeeper.common.failpoints import failpoint
from pagekeeper.v1 import runner_pb2


class RunnerLostError(Exception):
    """The runner is not to be waited for any longer; the text says why."""


class RunnerLink:
    """Carries the router's word to one runner, and tells the router what the runner does.

    Args:
        router: gets this link when the runner is ready, and is told when it is lost.
        send: takes the next message for the runner; must not block.
        on_ready: called once, with the runner's id, just before the router gets this link.

    Attributes:
        was_ready: the runner has introduced itself, and its engine was seen to be alive.
        is_draining: it has said that it takes no more.
    """

    def __init__(
        self,
        router: Router,
        send: Callable[[runner_pb2.ServeRequest], None],
        on_ready: Callable[[str], None],
    ) -> None:
        self._router = router
        self._send = send
        self._on_ready = on_ready
        self._hello: runner_pb2.RunnerHello | None = None
        self._liveness = Liveness()
        self._nonce = 0
        self.was_ready = False
        self.is_draining = False

    def submit(self, generation: Generation, max_tokens: int) -> None:
        """Send the current attempt of a generation; raises if no message can hold it."""
        self._send(runner_pb2.ServeRequest(submit=to_submit(generation, max_tokens)))

    def cancel(self, number: int, candidates: Sequence[int] = ()) -> None:
        """Tell the runner to stop a request, or only these candidates of it."""
        cancel = runner_pb2.Cancel(request=number, candidates=candidates)
        self._send(runner_pb2.ServeRequest(cancel=cancel))

    def ping(self) -> None:
        """Ask whether the runner lives; to be called every `PING_INTERVAL_S`.

        Raises:
            RunnerLostError: it has left too many of these unanswered.
        """
        if self._liveness.is_lost:
            raise RunnerLostError(f"no answer to {self._liveness.num_unanswered} pings")
        self._liveness.ping()
        self._nonce += 1
        self._send(runner_pb2.ServeRequest(ping=runner_pb2.Ping(nonce=self._nonce)))

    def take(self, response: runner_pb2.ServeResponse) -> None:
        """The runner says something.

        Raises:
            RunnerLostError: it is its engine that hangs.
            Exception: no runner should say that.
        """
        match response.WhichOneof("message"):
            case "hello":
                self._hello = response.hello
            case "pong":
                self._take_pong(response.pong.engine)
            case "draining":
                self.is_draining = True
                self._router.drain(self)
            case "step":
                self._take_step(response.step)

    def lose(self) -> int:
        """Have what is with the runner go on elsewhere; returns how many generations that are."""
        return self._router.lose(self)

    def _take_pong(self, engine: runner_pb2.EngineReport) -> None:
        if is_hung(engine):
            raise RunnerLostError(f"step {engine.step} hangs")
        if self._hello is None:
            raise BugError("the runner has not introduced itself")
        self._liveness.pong()
        if not self.was_ready:
            if self.is_draining:
                return  # it was on its way out when we came
            info = from_hello(self._hello)
            self.was_ready = True
            self._on_ready(self._hello.runner_id)
            self._router.ready(self, info)
        self._router.report(self, has_manager=has_manager(engine))

    def _take_step(self, step: runner_pb2.StepOutput) -> None:
        failpoint("gateway.after_tokens")
        # A prompt's log-probabilities come before its first token.
        for prompt in step.prompts:
            self._router.take_prompt_logprobs(self, prompt.request, prompt.attempt, prompt.logprobs)
        for output in step.outputs:
            if output.HasField("refusal"):
                self._router.refuse(self, output.request, output.attempt, to_error(output.refusal))
            else:
                tokens, use = to_tokens(output), to_cache_use(output)
                self._router.take_tokens(self, output.request, output.attempt, output.position, tokens, use)
        for search in step.beams:
            self._router.take_beams(self, search.request, search.attempt, to_beams(search))
