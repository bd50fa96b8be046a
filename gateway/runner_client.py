"""Every generation's way to a runner, and on to the next one when that is lost."""

import asyncio
import contextlib
import itertools
import random
from pathlib import Path

import structlog

from gateway.finish_reason import FinishReason
from gateway.generation import Generation
from gateway.runner_link import Output, RunnerLink
from gateway.token_stream import Beam, Tokens
from gateway.validation import Limits
from pagekeeper.common.errors import BugError, FieldViolation, InvalidRequestError, UnavailableError
from pagekeeper.common.sockets import RuntimeDir, unix_target
from pagekeeper.v1 import runner_pb2

_RESCAN_INTERVAL_S = 0.2
_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 0.2
# A request that takes every runner down with it must not go round for ever.
_MAX_LOSSES_IN_A_ROW = 5

log = structlog.get_logger()


class RunnerClient:
    """Keeps a link to each runner in the runtime directory and spreads generations over those that are ready.

    A first submission and one after a runner was lost are the same thing: prompt and tokens so far go to a ready runner
    under the next attempt number, or wait for one. There is nothing else to recover.

    Args:
        runtime_dir: where runners' sockets appear.
        runner_wait_s: longest time a generation waits for a ready runner, in seconds.
    """

    def __init__(self, runtime_dir: RuntimeDir, runner_wait_s: float) -> None:
        self._runtime_dir = runtime_dir
        self._runner_wait_s = runner_wait_s
        self._numbers = itertools.count(1)
        self._links: list[RunnerLink] = []
        self._waiting: dict[int, tuple[Generation, asyncio.TimerHandle]] = {}
        self._limits: Limits | None = None
        self._has_met_runner = asyncio.Event()

    @property
    def is_serving(self) -> bool:
        """Whether some runner is alive and has its cache manager."""
        return any(link.is_serving for link in self._links)

    @property
    def has_limits(self) -> bool:
        """Whether `limits` are known."""
        return self._limits is not None

    async def limits(self) -> Limits:
        """What the model can take; known from the first runner on.

        Raises:
            UnavailableError: no runner came within the wait limit.
        """
        if self._limits is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_met_runner.wait(), self._runner_wait_s)
        if self._limits is None:
            raise UnavailableError(f"no runner became ready within {self._runner_wait_s:g} s")
        return self._limits

    def submit(self, generation: Generation) -> None:
        """Have the generation's stream filled until its last token, `cancel`, or failure. Raises nothing itself."""
        generation.number = next(self._numbers)
        self._place(generation)

    def cancel(self, generation: Generation) -> None:
        """Stop a generation, wherever it is; nothing happens if it has ended."""
        self._stop_waiting(generation)
        for link in self._links:
            link.cancel(generation.number)

    def cancel_candidate(self, generation: Generation, candidate: int) -> None:
        """Stop one candidate, wherever its generation is; the others go on."""
        generation.stream.close(candidate)
        for link in self._links:
            link.cancel_candidate(generation.number, candidate)

    async def serve(self) -> None:
        """Look for runners and keep the links to them, until cancelled."""
        known: dict[Path, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as tasks:
            while True:
                known = {path: task for path, task in known.items() if not task.done()}
                for path in self._runtime_dir.runner_sockets():
                    if path not in known:
                        known[path] = tasks.create_task(self._keep_link(path))
                await asyncio.sleep(_RESCAN_INTERVAL_S)

    async def _keep_link(self, path: Path) -> None:
        """Connect to one runner's socket, again each time it is lost, as long as the socket exists."""
        backoff_s = _FIRST_BACKOFF_S
        while path in self._runtime_dir.runner_sockets():
            link = RunnerLink(unix_target(path), self._on_ready, self._on_output)
            self._links.append(link)
            try:
                reason = await link.run()
            finally:
                self._links.remove(link)
            if link.was_ready:
                backoff_s = _FIRST_BACKOFF_S
                log.warning("runner lost", socket=path.name, reason=reason, live=len(link.generations))
            else:
                log.debug("runner not ready", socket=path.name, reason=reason)
            for generation in link.generations.values():
                generation.losses_in_a_row += 1
                self._place(generation)
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)

    def _place(self, generation: Generation) -> None:
        """Submit to the ready runner with the least to do, or wait for one."""
        if generation.losses_in_a_row >= _MAX_LOSSES_IN_A_ROW:
            # Not UNAVAILABLE: a client that tries again would take the runners down again.
            text = f"{generation.losses_in_a_row} runners were lost in a row before they made a token"
            generation.stream.fail(BugError(f"request {generation.request.request_id}: {text}"))
            return
        ready = [link for link in self._links if link.is_ready]
        if ready:
            try:
                min(ready, key=lambda link: len(link.generations)).submit(generation)
            except Exception as error:  # noqa: BLE001 - it is this request's fault, and others are being placed as well
                generation.stream.fail(error)
            return
        timer = asyncio.get_running_loop().call_later(self._runner_wait_s, self._give_up, generation)
        self._waiting[generation.number] = generation, timer

    def _give_up(self, generation: Generation) -> None:
        self._stop_waiting(generation)
        text = f"no runner became ready within {self._runner_wait_s:g} s"
        generation.stream.fail(UnavailableError(text))

    def _stop_waiting(self, generation: Generation) -> None:
        if generation.number in self._waiting:
            _, timer = self._waiting.pop(generation.number)
            timer.cancel()

    def _on_ready(self, hello: runner_pb2.RunnerHello) -> None:
        log.info("runner ready", runner_id=hello.runner_id, waiting=len(self._waiting))
        self._limits = Limits(hello.vocab_size, hello.max_context_length)
        self._has_met_runner.set()
        for generation, _ in list(self._waiting.values()):
            self._stop_waiting(generation)
            self._place(generation)

    def _on_output(self, link: RunnerLink, output: Output) -> None:
        generation = link.generations.get(output.request)
        if generation is None or output.attempt != generation.attempt:
            return
        if isinstance(output, runner_pb2.SequenceOutput) and output.HasField("refusal"):
            del link.generations[generation.number]
            self._on_refusal(link, generation, output.refusal)
            return
        try:
            _accept(generation, output)
        except BugError as error:
            link.cancel(generation.number)
            generation.stream.fail(error)
        if generation.stream.has_ended:
            link.generations.pop(generation.number, None)

    def _on_refusal(self, link: RunnerLink, generation: Generation, refusal: runner_pb2.Refusal) -> None:
        match refusal.code:
            case runner_pb2.Refusal.CODE_DRAINING:
                link.is_draining = True
                self._place(generation)
            case runner_pb2.Refusal.CODE_INVALID:
                generation.stream.fail(InvalidRequestError(FieldViolation(refusal.field, refusal.detail)))
            case _:
                generation.stream.fail(BugError(f"the runner failed, error id {refusal.error_id}: {refusal.detail}"))


def _accept(generation: Generation, output: Output) -> None:
    if isinstance(output, runner_pb2.SequenceOutput):
        if output.HasField("usage"):
            generation.count(output.candidate, output.usage.cached_tokens, output.usage.recomputed_tokens)
        tokens = Tokens(
            candidate=output.candidate,
            token_ids=list(output.token_ids),
            finish_reason=FinishReason(output.finish_reason) if output.finish_reason else None,
            logprobs=output.logprobs,
            score=output.score if output.HasField("score") else None,
        )
        generation.accept(output.position, tokens)
    elif isinstance(output, runner_pb2.PromptOutput):
        generation.accept_prompt_logprobs(output.logprobs)
    else:
        generation.accept_beams([Beam(list(beam.token_ids), beam.score) for beam in output.beams])
