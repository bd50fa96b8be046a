"""GenerateService: the life of a request, from its message to its last token."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import structlog

from gateway.admission import Admission
from gateway.authentication import Context, tenant_of
from gateway.config import GatewaySettings
from gateway.intake import Intake
from gateway.live_requests import LiveRequest, LiveRequests
from gateway.model import ServedModel
from gateway.resolver import Resolver
from gateway.runner_client import RunnerClient
from gateway.sampling import Caps
from gateway.token_stream import News, TokenStream
from gateway.validation import check_model, check_token_ids, text_or_chat
from pagekeeper.common.errors import DeadlineError, DrainingError, UnavailableError
from pagekeeper.common.failpoints import failpoint
from pagekeeper.v1 import generate_pb2, generate_pb2_grpc

# Measured here: 6,000 messages/s are the most, and then nothing else is done.
_MESSAGES_PER_S = 4000
_SHORTEST_PAUSE_S = 0.001
_SWEEP_INTERVAL_S = 1.0
_TOO_LATE = "the request took longer than this server allows"

log = structlog.get_logger()


class GenerateService(generate_pb2_grpc.GenerateServiceServicer):
    """Answers clients. Lives on one event loop.

    Args:
        model: the one that is served.
        runners: who does the work.
        settings: limits.
    """

    def __init__(self, model: ServedModel, runners: RunnerClient, settings: GatewaySettings) -> None:
        self._model = model
        self._runners = runners
        self._settings = settings
        caps = Caps(
            max_n=settings.max_n,
            max_beam_width=settings.max_beam_width,
            max_logprobs=settings.max_logprobs,
            max_logprob_values=settings.max_logprob_values,
        )
        self._resolver = Resolver(model, caps)
        self._admission = Admission(settings.max_concurrent, settings.max_queue)
        self._live = LiveRequests()
        self._intake = Intake(self._live, self._admission, runners)
        self._is_draining = False
        self._entering: set[asyncio.Timeout] = set()

    async def Generate(
        self, request: generate_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[generate_pb2.GenerateResponse]:
        """Resolve, enter, take a permit, submit, pass tokens on as they come, finish."""
        deadline = self._deadline()
        async with self._before_entering(deadline):
            if not self._runners.has_limits:
                # Whoever waits for a first runner does not wait for an error.
                self._resolver.check_parameters(request)
            valid, resolved = await self._resolver.resolve(request, tenant_of(context), await self._runners.limits())
            messages = await self._resolver.messages(valid, resolved)
        structlog.contextvars.bind_contextvars(request_id=resolved.request_id, tenant=resolved.tenant)

        generation = messages.begin(valid.resumed or {}, valid.ended)
        live = LiveRequest(generation)
        context.add_done_callback(lambda _: live.release.close())  # type: ignore[arg-type]  # the stub names no protocol
        try:
            if self._is_draining:
                raise DrainingError()
            self._intake.enter(live, takes_over=valid.resumed is not None)
            self._end_at(deadline, live)

            while messages.open:
                for index in messages.add(await _next(generation.stream, messages.num_emitted)):
                    self._runners.cancel_candidate(generation, index)
                if messages.open and valid.stream:
                    yield messages.take()
                    failpoint("gateway.after_emit")
                    await self._let_tokens_gather()

            # Whoever reads the last message slowly holds nothing that others wait for.
            live.release.close()
            response = messages.take_last(generation)
            log.info(
                "request finished", prompt=response.usage.prompt_tokens, completion=response.usage.completion_tokens
            )
            yield response
            failpoint("gateway.after_emit")
        finally:
            live.release.close()

    async def Tokenize(self, request: generate_pb2.TokenizeRequest, context: Context) -> generate_pb2.TokenizeResponse:
        """The token ids that Generate would use for the same input."""
        check_model(request.model, self._model.name)
        async with self._before_entering(self._deadline()):
            limits = await self._runners.limits()
            token_ids = await self._resolver.tokenize(
                text_or_chat(request, limits, self._model.tokenizer.longest_token)
            )
        return generate_pb2.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(
        self, request: generate_pb2.DetokenizeRequest, context: Context
    ) -> generate_pb2.DetokenizeResponse:
        """The text that an answer with these tokens has."""
        check_model(request.model, self._model.name)
        async with self._before_entering(self._deadline()):
            limits = await self._runners.limits()
        tokenizer = self._model.tokenizer
        check_token_ids("token_ids", request.token_ids, tokenizer.vocab_size, limits.max_context_length)
        return generate_pb2.DetokenizeResponse(text=await self._resolver.decode(list(request.token_ids)))

    async def ListModels(
        self, request: generate_pb2.ListModelsRequest, context: Context
    ) -> generate_pb2.ListModelsResponse:
        """The one model that is served."""
        async with self._before_entering(self._deadline()):
            limits = await self._runners.limits()
        model = generate_pb2.ModelInfo(
            name=self._model.name, vocab_size=limits.vocab_size, max_context_length=limits.max_context_length
        )
        return generate_pb2.ListModelsResponse(models=[model])

    async def watch_readers(self) -> None:
        """End the streams of clients that do not read them, until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_INTERVAL_S)
            self._live.end_slow_readers(self._settings.slow_reader_tokens, self._settings.slow_reader_s)

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, let the live ones go on for `grace_s` seconds, and end those that are left."""
        self._is_draining = True
        now = asyncio.get_running_loop().time()
        for scope in self._entering:
            if not scope.expired():
                scope.reschedule(now)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._live.emptied.wait()
        self._live.end_all()

    async def _let_tokens_gather(self) -> None:
        """Pause between two messages of a stream, the longer the more streams have tokens to send.

        A message costs the event loop the same with one token or with many, so beyond its rate tokens must share. At
        the usual pace of decoding no token is held up: the pause is over before the next one comes.
        """
        pause_s = self._pause_s()
        if pause_s > _SHORTEST_PAUSE_S:
            await asyncio.sleep(pause_s)

    def _pause_s(self) -> float:
        """Only requests with a permit get tokens; those in the queue cost nothing."""
        return self._admission.running / _MESSAGES_PER_S

    def _deadline(self) -> float | None:
        limit_s = self._settings.max_request_s
        return asyncio.get_running_loop().time() + limit_s if limit_s else None

    @contextlib.asynccontextmanager
    async def _before_entering(self, deadline: float | None) -> AsyncIterator[None]:
        """What a call does before it is a live request ends at its deadline, and at a drain."""
        if self._is_draining:
            raise DrainingError()
        try:
            async with asyncio.timeout_at(deadline) as scope:
                self._entering.add(scope)
                try:
                    yield
                finally:
                    self._entering.remove(scope)
        except TimeoutError as error:
            raise DrainingError() if self._is_draining else DeadlineError(_TOO_LATE) from error

    def _end_at(self, deadline: float | None, live: LiveRequest) -> None:
        """End the request then, wherever its handler is: at a `yield` nothing else would reach it."""
        if deadline is not None:
            timer = asyncio.get_running_loop().call_at(deadline, live.end, DeadlineError(_TOO_LATE))
            live.release.callback(timer.cancel)


async def _next(stream: TokenStream, emitted: int) -> News:
    try:
        return await stream.next()
    except UnavailableError as error:
        error.tokens_emitted = emitted
        raise
