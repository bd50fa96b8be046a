"""GenerateService: the life of a request, from its message to its last token."""

import asyncio
import contextlib
import functools
import secrets
import uuid
from collections.abc import AsyncIterator, Sequence

import structlog

from gateway.admission import Admission
from gateway.authentication import Context, tenant_of
from gateway.config import GatewaySettings
from gateway.finish_reason import FinishReason
from gateway.generation import Generation, ResolvedRequest
from gateway.live_requests import LiveRequest, LiveRequests
from gateway.model import ServedModel
from gateway.runner_client import RunnerClient
from gateway.text.answer import Answer
from gateway.token_stream import Tokens, TokenStream
from gateway.validation import (
    Prompt,
    ValidRequest,
    check_model,
    check_parameters,
    check_token_ids,
    fit,
    text_or_chat,
    validate,
)
from pagekeeper.common.errors import DeadlineError, DuplicateRequestError, UnavailableError
from pagekeeper.v1 import generate_pb2, generate_pb2_grpc
from pagekeeper.v1.types_pb2 import Usage

# Longer texts are tokenised on a thread (the library lets other threads run meanwhile): a megabyte takes a second,
# and every stream and every ping shares the event loop.
_LONG_TEXT = 16 * 1024
# Measured here: 6,000 messages/s are the most, and then nothing else is done.
_MESSAGES_PER_S = 4000
_SHORTEST_PAUSE_S = 0.001
# What a JSON reader that keeps numbers as doubles can give back.
_SEED_BITS = 53
_SWEEP_INTERVAL_S = 1.0
_DRAINING = "the server is shutting down"
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
        self._admission = Admission(settings.max_concurrent, settings.max_queue)
        self._live = LiveRequests()
        self._is_draining = False
        self._entering: set[asyncio.Timeout] = set()

    async def Generate(
        self, request: generate_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[generate_pb2.GenerateResponse]:
        """Resolve, enter, take a permit, submit, pass tokens on as they come, finish."""
        deadline = self._deadline()
        async with self._before_entering(deadline):
            valid, resolved = await self._resolve(request, tenant_of(context))
        structlog.contextvars.bind_contextvars(request_id=resolved.request_id, tenant=resolved.tenant)

        answer = Answer(self._model.tokenizer.detokenizer(), valid.sampling.stop)
        resumed, finish_reason = _resume(answer, resolved, valid.resumed or [])
        generation = Generation(resolved, [*resumed])
        live = LiveRequest(generation)
        context.add_done_callback(lambda _: live.release.close())  # type: ignore[arg-type]  # the stub names no protocol
        try:
            self._enter(live, finish_reason, takes_over=valid.resumed is not None)
            self._end_at(deadline, live)

            response = generate_pb2.GenerateResponse(request_id=resolved.request_id, seed=resolved.seed)
            delta = response.deltas.add(position=len(resumed))
            while True:
                tokens = await _next(generation.stream, emitted=delta.position)
                piece = answer.push(tokens.token_ids, tokens.finish_reason)
                delta.token_ids.extend(piece.token_ids)
                delta.text += piece.text
                if piece.finish_reason:
                    break
                if valid.stream:
                    yield response
                    await self._let_tokens_gather()
                    position = delta.position + len(delta.token_ids)
                    response = generate_pb2.GenerateResponse(request_id=resolved.request_id)
                    delta = response.deltas.add(position=position)

            # Whoever reads the last message slowly holds nothing that others wait for.
            live.release.close()
            delta.finish_reason = piece.finish_reason.value
            response.usage.CopyFrom(_usage(generation, len(resumed), delta.position + len(delta.token_ids)))
            log.info(
                "request finished", prompt=response.usage.prompt_tokens, completion=response.usage.completion_tokens
            )
            yield response
        finally:
            live.release.close()

    async def Tokenize(self, request: generate_pb2.TokenizeRequest, context: Context) -> generate_pb2.TokenizeResponse:
        """The token ids that Generate would use for the same input."""
        check_model(request.model, self._model.name)
        async with self._before_entering(self._deadline()):
            limits = await self._runners.limits()
            token_ids = await self._tokenize(text_or_chat(request, limits, self._model.tokenizer.longest_token))
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
        if len(request.token_ids) <= _LONG_TEXT:
            return generate_pb2.DetokenizeResponse(text=tokenizer.decode(request.token_ids))
        text = await asyncio.to_thread(tokenizer.decode, list(request.token_ids))
        return generate_pb2.DetokenizeResponse(text=text)

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
        self._live.end_all(_DRAINING)

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
            raise UnavailableError(_DRAINING)
        try:
            async with asyncio.timeout_at(deadline) as scope:
                self._entering.add(scope)
                try:
                    yield
                finally:
                    self._entering.remove(scope)
        except TimeoutError as error:
            raise UnavailableError(_DRAINING) if self._is_draining else DeadlineError(_TOO_LATE) from error

    async def _resolve(
        self, request: generate_pb2.GenerateRequest, tenant: str
    ) -> tuple[ValidRequest, ResolvedRequest]:
        """Check the request, make its prompt tokens, and fill in what it leaves open."""
        name, defaults, tokenizer = self._model.name, self._model.defaults, self._model.tokenizer
        if not self._runners.has_limits:
            # Whoever waits for a first runner does not wait for an error.
            check_parameters(request, name, defaults)
        limits = await self._runners.limits()
        valid = validate(request, name, defaults, limits, tokenizer.longest_token)
        prompt = await self._tokenize(valid.prompt)
        return valid, self._resolved(valid, prompt, tenant, max_tokens=fit(valid, prompt, limits))

    async def _tokenize(self, prompt: Prompt) -> list[int]:
        tokenizer = self._model.tokenizer
        match prompt:
            case str():
                length, encode = len(prompt), functools.partial(tokenizer.encode, prompt)
            case tuple():
                length = sum(len(turn.role) + len(turn.content) for turn in prompt)
                encode = functools.partial(tokenizer.encode_chat, prompt)
            case _:
                return prompt
        return await asyncio.to_thread(encode) if length > _LONG_TEXT else encode()

    def _resolved(self, valid: ValidRequest, prompt: list[int], tenant: str, max_tokens: int) -> ResolvedRequest:
        sampling = valid.sampling
        end_token_ids = frozenset[int]() if sampling.ignore_eos else self._model.end_token_ids
        return ResolvedRequest(
            request_id=valid.request_id or uuid.uuid4().hex,
            tenant=tenant,
            prompt_token_ids=prompt,
            sampling=sampling,
            seed=secrets.randbits(_SEED_BITS) if sampling.seed is None else sampling.seed,
            max_tokens=max_tokens,
            stop_token_ids=sampling.stop_token_ids | end_token_ids,
            priority=valid.priority,
        )

    def _enter(self, live: LiveRequest, finish_reason: FinishReason | None, *, takes_over: bool) -> None:
        """Register a request and queue for a permit, unless its answer is complete with `finish_reason`.

        Whether it may is decided first: only then is an older stream that it takes over ended.
        """
        if self._is_draining:
            raise UnavailableError(_DRAINING)
        request = live.generation.request
        older = self._live.find(request.tenant, request.request_id)
        if older is not None and not takes_over:
            raise DuplicateRequestError(f"request id {request.request_id!r} has a live stream")
        if finish_reason:
            live.generation.stream.push([], finish_reason)
        else:
            self._admit(live, older)
        self._live.enter(live)

    def _admit(self, live: LiveRequest, older: LiveRequest | None) -> None:
        """Queue for a permit, or take the older stream's; with it the generation goes to a runner."""
        generation = live.generation

        def start() -> None:
            if older is not None:
                # First, so that what it lets go is found in the cache.
                self._runners.cancel(older.generation)
            self._runners.submit(generation)

        permit = live.permit = self._admission.permit(generation.request.priority, start)
        live.release.callback(self._admission.leave, permit)
        live.release.callback(self._runners.cancel, generation)
        # A client that is slow to read the end of its answer keeps no one from a runner.
        generation.stream.when_ended(functools.partial(self._admission.leave, permit))
        self._admission.enter(permit, instead_of=older.permit if older else None)

    def _end_at(self, deadline: float | None, live: LiveRequest) -> None:
        """End the request then, wherever its handler is: at a `yield` nothing else would reach it."""
        if deadline is not None:
            timer = asyncio.get_running_loop().call_at(deadline, live.end, DeadlineError(_TOO_LATE))
            live.release.callback(timer.cancel)


def _resume(
    answer: Answer, request: ResolvedRequest, token_ids: list[int]
) -> tuple[Sequence[int], FinishReason | None]:
    """Rebuild the answer's state behind tokens that the client has; says whether they end the answer already."""
    end = next((index for index, token_id in enumerate(token_ids) if token_id in request.stop_token_ids), None)
    piece = answer.push(token_ids[:end])
    if piece.finish_reason or end is not None:
        return piece.token_ids, FinishReason.STOP
    return token_ids, FinishReason.LENGTH if len(token_ids) >= request.max_tokens else None


async def _next(stream: TokenStream, emitted: int) -> Tokens:
    try:
        return await stream.next()
    except UnavailableError as error:
        raise UnavailableError(str(error), tokens_emitted=emitted) from error


def _usage(generation: Generation, resumed_tokens: int, completion_tokens: int) -> Usage:
    return Usage(
        prompt_tokens=len(generation.request.prompt_token_ids),
        cached_tokens=generation.cached_tokens or 0,
        resumed_tokens=resumed_tokens,
        recomputed_tokens=sum(generation.recomputed_tokens.values()),
        completion_tokens=completion_tokens,
    )
