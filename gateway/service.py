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
from gateway.generation import Generation, Work
from gateway.live_requests import LiveRequest, LiveRequests
from gateway.model import ServedModel
from gateway.runner_client import RunnerClient
from gateway.text.answer import Answer
from gateway.token_stream import Tokens, TokenStream
from gateway.validation import Prompt, ValidRequest, chat_turns, check_model, check_token_ids, fit, validate
from pagekeeper.common.errors import DeadlineError, FieldViolation, InvalidRequestError, UnavailableError
from pagekeeper.v1 import generate_pb2, generate_pb2_grpc
from pagekeeper.v1.types_pb2 import Usage

# Longer texts are tokenised on a thread (the library lets other threads run meanwhile): a megabyte takes a second,
# and every stream and every ping shares the event loop.
_LONG_TEXT = 16 * 1024
# Measured here: 6,000 messages/s are the most, and then nothing else is done.
_MESSAGES_PER_S = 4000
_SHORTEST_PAUSE_S = 0.001
_SEED_BITS = 63
_SWEEP_INTERVAL_S = 1.0

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

    async def Generate(
        self, request: generate_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[generate_pb2.GenerateResponse]:
        """Validate, tokenise, enter, take a permit, submit, pass tokens on as they come, finish."""
        deadline = self._deadline()
        limits = await self._runners.limits()
        valid = validate(request, self._model.name, self._model.defaults, limits)
        prompt = await self._tokenize(valid.prompt)
        work = self._work(valid, prompt, tenant_of(context), max_tokens=fit(valid, prompt, limits))
        structlog.contextvars.bind_contextvars(request_id=work.request_id, tenant=work.tenant)

        answer = Answer(self._model.tokenizer.detokenizer(), valid.sampling.stop)
        resumed, finish_reason = _resume(answer, work, valid.resumed or [])
        generation = Generation(work, [*resumed])
        live = LiveRequest(generation)
        context.add_done_callback(lambda _: live.release.close())  # type: ignore[arg-type]  # the stub names no protocol
        try:
            self._enter(live, takes_over=valid.resumed is not None)
            if finish_reason:
                generation.stream.push([], finish_reason)
            else:
                self._admit(live)

            response = generate_pb2.GenerateResponse(request_id=work.request_id, seed=work.seed)
            delta = response.deltas.add(position=len(resumed))
            while True:
                tokens = await _next(generation.stream, deadline, emitted=delta.position)
                piece = answer.push(tokens.token_ids, tokens.finish_reason)
                delta.token_ids.extend(piece.token_ids)
                delta.text += piece.text
                if piece.finish_reason:
                    break
                if valid.stream:
                    yield response
                    await self._let_tokens_gather()
                    position = delta.position + len(delta.token_ids)
                    response = generate_pb2.GenerateResponse(request_id=work.request_id)
                    delta = response.deltas.add(position=position)

            # Whoever reads the last message slowly holds nothing that others wait for.
            live.release.close()
            delta.finish_reason = piece.finish_reason.value
            response.usage.CopyFrom(_usage(generation, len(resumed), delta.position + len(delta.token_ids)))
            log.info("request finished", prompt=len(prompt), completion=response.usage.completion_tokens)
            yield response
        finally:
            live.release.close()

    async def Tokenize(self, request: generate_pb2.TokenizeRequest, context: Context) -> generate_pb2.TokenizeResponse:
        """The token ids that Generate would use for the same input."""
        check_model(request.model, self._model.name)
        match request.WhichOneof("input"):
            case "text":
                token_ids = await self._tokenize(request.text)
            case "chat":
                token_ids = await self._tokenize(chat_turns(request.chat))
            case _:
                raise InvalidRequestError(FieldViolation("text", "set text or chat"))
        return generate_pb2.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(
        self, request: generate_pb2.DetokenizeRequest, context: Context
    ) -> generate_pb2.DetokenizeResponse:
        """The text that an answer with these tokens has."""
        check_model(request.model, self._model.name)
        check_token_ids("token_ids", request.token_ids, self._model.tokenizer.vocab_size)
        return generate_pb2.DetokenizeResponse(text=self._model.tokenizer.decode(request.token_ids))

    async def ListModels(
        self, request: generate_pb2.ListModelsRequest, context: Context
    ) -> generate_pb2.ListModelsResponse:
        """The one model that is served."""
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
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._live.emptied.wait()
        self._live.end_all("the server is shutting down")

    async def _let_tokens_gather(self) -> None:
        """Pause between two messages of a stream, the longer the more streams there are.

        A message costs the event loop the same with one token or with many, so beyond its rate tokens must share. At
        the usual pace of decoding no token is held up: the pause is over before the next one comes.
        """
        pause_s = len(self._live) / _MESSAGES_PER_S
        if pause_s > _SHORTEST_PAUSE_S:
            await asyncio.sleep(pause_s)

    def _deadline(self) -> float | None:
        limit_s = self._settings.max_request_s
        return asyncio.get_running_loop().time() + limit_s if limit_s else None

    async def _tokenize(self, prompt: Prompt) -> list[int]:
        tokenizer = self._model.tokenizer
        match prompt:
            case str():
                length, encode = len(prompt), functools.partial(tokenizer.encode, prompt)
            case tuple():
                length = sum(len(turn.content) for turn in prompt)
                encode = functools.partial(tokenizer.encode_chat, prompt)
            case _:
                return prompt
        return await asyncio.to_thread(encode) if length > _LONG_TEXT else encode()

    def _work(self, valid: ValidRequest, prompt: list[int], tenant: str, max_tokens: int) -> Work:
        sampling = valid.sampling
        end_token_ids = frozenset[int]() if sampling.ignore_eos else self._model.end_token_ids
        return Work(
            request_id=valid.request_id or uuid.uuid4().hex,
            tenant=tenant,
            prompt_token_ids=prompt,
            sampling=sampling,
            seed=secrets.randbits(_SEED_BITS) if sampling.seed is None else sampling.seed,
            max_tokens=max_tokens,
            stop_token_ids=sampling.stop_token_ids | end_token_ids,
            priority=valid.priority,
        )

    def _enter(self, live: LiveRequest, *, takes_over: bool) -> None:
        if self._is_draining:
            raise UnavailableError("the server is shutting down")
        self._live.enter(live, takes_over=takes_over)

    def _admit(self, live: LiveRequest) -> None:
        """Queue for a permit; with it the generation goes to a runner, and its stream begins to fill."""
        generation = live.generation
        ticket = self._admission.enter(generation.work.priority, lambda: self._runners.submit(generation))
        live.release.callback(self._admission.leave, ticket)
        live.release.callback(self._runners.cancel, generation)


def _resume(answer: Answer, work: Work, token_ids: list[int]) -> tuple[Sequence[int], FinishReason | None]:
    """Rebuild the answer's state behind tokens that the client has; says whether they end the answer already."""
    end = next((index for index, token_id in enumerate(token_ids) if token_id in work.stop_token_ids), None)
    piece = answer.push(token_ids[:end])
    if piece.finish_reason or end is not None:
        return piece.token_ids, FinishReason.STOP
    return token_ids, FinishReason.LENGTH if len(token_ids) >= work.max_tokens else None


async def _next(stream: TokenStream, deadline: float | None, emitted: int) -> Tokens:
    try:
        async with asyncio.timeout_at(deadline):
            return await stream.next()
    except TimeoutError as error:
        raise DeadlineError("the request took longer than this server allows") from error
    except UnavailableError as error:
        raise UnavailableError(str(error), tokens_emitted=emitted) from error


def _usage(generation: Generation, resumed_tokens: int, completion_tokens: int) -> Usage:
    return Usage(
        prompt_tokens=len(generation.work.prompt_token_ids),
        cached_tokens=generation.cached_tokens or 0,
        resumed_tokens=resumed_tokens,
        recomputed_tokens=sum(generation.recomputed_tokens.values()),
        completion_tokens=completion_tokens,
    )
