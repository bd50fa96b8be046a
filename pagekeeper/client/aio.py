"""The client for programs with an event loop: what sync.py has, to be awaited."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Self, TypeVar, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagekeeper.client.attempts import RESUME_FOR_S, Attempts, Route
from pagekeeper.client.channel import OPTIONS
from pagekeeper.client.connection import HEALTH_TIMEOUT_S
from pagekeeper.client.requests import detokenize_request, generate_request, tokenize_request
from pagekeeper.client.responses import CLOSED, BaseAnswer, first_text, is_serving, models
from pagekeeper.client.values import Beam, Candidate, Delta, Message, ModelInfo, Prompt, Resume, Sampling
from pagekeeper.common.errors import PagekeeperError, UnavailableError
from pagekeeper.v1 import generate_pb2, generate_pb2_grpc

Response = TypeVar("Response")


class AsyncChannels:
    """One to each address of a route, opened when it is first used, on the event loop that runs then."""

    def __init__(self) -> None:
        self._open: dict[str, grpc.aio.Channel] = {}
        self._closed = asyncio.Event()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed.is_set()

    def to(self, address: str) -> grpc.aio.Channel:
        """The channel to an address.

        Raises:
            UnavailableError: they are closed.
        """
        if self._closed.is_set():
            raise UnavailableError(CLOSED)
        if address not in self._open:
            self._open[address] = grpc.aio.insecure_channel(
                address, options=OPTIONS, compression=grpc.Compression.NoCompression
            )
        return self._open[address]

    async def close(self) -> None:
        """Close all; what still runs on them is ended, and who pauses goes on."""
        self._closed.set()
        await asyncio.gather(*(channel.close() for channel in self._open.values()))

    async def pause(self, seconds: float) -> None:
        """Wait, until they are closed at the most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closed.wait()


class AsyncAnswer(BaseAnswer, AsyncIterator[Delta]):
    """The deltas of one request as they come. `anext` reads one; a loop that is left early ends the request."""

    _call: "grpc.aio.UnaryStreamCall[generate_pb2.GenerateRequest, generate_pb2.GenerateResponse]"

    def __init__(
        self,
        request: generate_pb2.GenerateRequest,
        attempts: Attempts,
        channels: AsyncChannels,
        start: "Callable[[generate_pb2.GenerateRequest, float | None], AsyncAnswer]",
    ) -> None:
        super().__init__(request, attempts)
        self._channels = channels
        # Holds the client too: a channel that is dropped closes, and ends what runs on it.
        self._start = start
        self._attempt()

    async def collect(self) -> list[Candidate]:
        """As `Answer.collect`."""
        async for _ in self:
            pass
        return self._in_order()

    async def text(self) -> str:
        """As `Answer.text`."""
        return first_text(await self.collect())

    def branch(
        self,
        position: int,
        *,
        candidate: int = 0,
        request_id: str = "",
        timeout_s: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> "AsyncAnswer":
        """As `Answer.branch`; starts the request at once, and is itself not awaited."""
        return self._start(self._branch(position, candidate, request_id, sampling), timeout_s)

    async def intermediate(self) -> AsyncIterator[list[Beam]]:
        """As `Answer.intermediate`."""
        try:
            while (response := await self._read()) is not None:
                if response.beams:
                    yield self.beams
        finally:
            self.close()

    async def __anext__(self) -> Delta:
        while not self._pending:
            if await self._read() is None:
                raise StopAsyncIteration
        return self._pending.popleft()

    async def _read(self) -> generate_pb2.GenerateResponse | None:
        """Take in the next message; None: there is none."""
        with self._final_failures():
            return await self._read_on()

    async def _read_on(self) -> generate_pb2.GenerateResponse | None:
        while not self._is_closed:
            try:
                response = await self._call.read()
            except grpc.RpcError as error:
                if self._is_closed or self.usage is not None:  # all has come but the end
                    return None
                await self._pause(error)
                if not self._is_closed:
                    self._attempt()
            except asyncio.CancelledError:
                if _is_cancelled():
                    raise
                if not self._is_closed:
                    raise UnavailableError(CLOSED, self._tokens_received()) from None
            else:
                if not isinstance(response, generate_pb2.GenerateResponse):  # grpc.aio.EOF
                    return None
                self._take(response)
                return response
        return None

    async def _pause(self, error: grpc.RpcError) -> None:
        """Wait until it is time for another attempt, if there is to be one."""
        await self._channels.pause(self._attempts.pause_s(error, self._tokens_received()))
        if self._channels.is_closed:
            raise UnavailableError(CLOSED, self._tokens_received()) from error

    def _attempt(self) -> None:
        address, left_s = self._attempts.next()
        stub: generate_pb2_grpc.GenerateServiceAsyncStub
        stub = generate_pb2_grpc.GenerateServiceStub(self._channels.to(address))
        self._call = self._cancellable = stub.Generate(self._next_request(), timeout=left_s)
        if self._is_closed:  # by another task meanwhile
            self._call.cancel()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return _Loop(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()


class _Loop(AsyncIterator[Delta]):
    """A loop over an answer. Python drops it as soon as the loop is left, which nothing else would tell us."""

    def __init__(self, answer: AsyncAnswer) -> None:
        self._answer = answer

    def __anext__(self) -> Awaitable[Delta]:
        return anext(self._answer)

    def __del__(self) -> None:
        self._answer.close()


class AsyncClient:
    """Asks a gateway for answers; used from the tasks of one event loop, on which it connects when first used.

    Methods, arguments and errors are those of `Client`.
    """

    def __init__(
        self,
        server: str,
        *,
        resume_for_s: float = RESUME_FOR_S,
        on_retry: Callable[[PagekeeperError], None] | None = None,
    ) -> None:
        self._route = Route(server, on_retry)
        self._resume_for_s = resume_for_s
        self._channels = AsyncChannels()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; what still runs on it is ended."""
        await self._channels.close()

    def generate(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        request_id: str = "",
        stream: bool = True,
        priority: int = 0,
        resume: Resume | None = None,
        timeout_s: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> AsyncAnswer:
        """As `Client.generate`; starts the request at once, and is itself not awaited."""
        request = generate_request(
            prompt,
            model=model,
            request_id=request_id,
            stream=stream,
            priority=priority,
            resume=resume,
            sampling=sampling,
        )
        return self._start(request, timeout_s)

    def _start(self, request: generate_pb2.GenerateRequest, timeout_s: float | None) -> AsyncAnswer:
        request.request_id = request.request_id or uuid.uuid4().hex
        return AsyncAnswer(request, self._attempts(timeout_s), self._channels, self._start)

    async def tokenize(
        self, prompt: str | Sequence[Message], *, model: str = "", timeout_s: float | None = None
    ) -> list[int]:
        """As `Client.tokenize`."""
        request = tokenize_request(prompt, model)
        response = await self._ask_for(lambda stub, left_s: stub.Tokenize(request, timeout=left_s), timeout_s)
        return list(response.token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "", timeout_s: float | None = None) -> str:
        """As `Client.detokenize`."""
        request = detokenize_request(token_ids, model)
        response = await self._ask_for(lambda stub, left_s: stub.Detokenize(request, timeout=left_s), timeout_s)
        return response.text

    async def list_models(self, *, timeout_s: float | None = None) -> list[ModelInfo]:
        """As `Client.list_models`."""
        request = generate_pb2.ListModelsRequest()
        response = await self._ask_for(lambda stub, left_s: stub.ListModels(request, timeout=left_s), timeout_s)
        return models(response.models)

    async def health(self, service: str = "", *, timeout_s: float | None = HEALTH_TIMEOUT_S) -> bool:
        """As `Client.health`."""

        def check(channel: grpc.aio.Channel, left_s: float | None) -> Awaitable[health_pb2.HealthCheckResponse]:
            stub = health_pb2_grpc.HealthStub(channel)
            # types-grpcio-health-checking leaves the stub's methods out
            return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=left_s)  # type: ignore[attr-defined,no-any-return]

        return is_serving(await self._ask(check, Attempts(self._route, timeout_s, resume_for_s=0.0)))

    async def _ask_for(
        self,
        call: "Callable[[generate_pb2_grpc.GenerateServiceAsyncStub, float | None], Awaitable[Response]]",
        timeout_s: float | None,
    ) -> Response:
        def ask(channel: grpc.aio.Channel, left_s: float | None) -> Awaitable[Response]:
            return call(generate_pb2_grpc.GenerateServiceStub(channel), left_s)

        return await self._ask(ask, self._attempts(timeout_s))

    async def _ask(
        self, call: Callable[[grpc.aio.Channel, float | None], Awaitable[Response]], attempts: Attempts
    ) -> Response:
        """As `Connection._ask`."""
        while True:
            address, left_s = attempts.next()
            try:
                response = await call(self._channels.to(address), left_s)
            except grpc.RpcError as error:
                await self._channels.pause(attempts.pause_s(error))
            except asyncio.CancelledError:
                if _is_cancelled():
                    raise
                raise UnavailableError(CLOSED) from None
            else:
                attempts.make_progress()
                return response

    def _attempts(self, timeout_s: float | None) -> Attempts:
        return Attempts(self._route, timeout_s, self._resume_for_s)


def _is_cancelled() -> bool:
    """Whether a CancelledError means our task; gRPC raises the same where only the call was cancelled."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
