"""The client for programs with an event loop: what sync.py has, to be awaited."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Self, TypeVar, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagekeeper.client.channel import OPTIONS
from pagekeeper.client.requests import detokenize_request, generate_request, tokenize_request
from pagekeeper.client.responses import BaseAnswer, first_text, is_serving, models
from pagekeeper.client.sync import HEALTH_TIMEOUT_S
from pagekeeper.client.values import Beam, Candidate, Delta, Message, ModelInfo, Prompt, Resume, Sampling
from pagekeeper.common.errors import UnavailableError
from pagekeeper.status import to_error
from pagekeeper.v1 import generate_pb2, generate_pb2_grpc

Response = TypeVar("Response")

_CLOSED = "the client was closed while a call was running on it"


class AsyncAnswer(BaseAnswer, AsyncIterator[Delta]):
    """The deltas of one request as they come. `anext` reads one; a loop that is left early ends the request."""

    def __init__(
        self,
        call: "grpc.aio.UnaryStreamCall[generate_pb2.GenerateRequest, generate_pb2.GenerateResponse]",
        request: generate_pb2.GenerateRequest,
        server: str,
        start: "Callable[[generate_pb2.GenerateRequest, float | None], AsyncAnswer]",
    ) -> None:
        super().__init__(call, request, server)
        self._call = call
        # Holds the client too: a channel that is dropped closes, and ends what runs on it.
        self._start = start

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
        try:
            response = await self._call.read()
        except grpc.RpcError as error:
            raise self._failure(error) from error
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            if self._is_closed:
                return None
            raise UnavailableError(_CLOSED, self._tokens_received()) from None
        if not isinstance(response, generate_pb2.GenerateResponse):  # grpc.aio.EOF
            return None
        self._take(response)
        return response

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

    def __init__(self, server: str) -> None:
        self._server = server
        self._opened: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; what still runs on it is ended."""
        await self._channel.close()

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
        return AsyncAnswer(self._stub.Generate(request, timeout=timeout_s), request, self._server, self._start)

    async def tokenize(
        self, prompt: str | Sequence[Message], *, model: str = "", timeout_s: float | None = None
    ) -> list[int]:
        """As `Client.tokenize`."""
        request = tokenize_request(prompt, model)
        response = await self._answer(self._stub.Tokenize(request, timeout=timeout_s))
        return list(response.token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "", timeout_s: float | None = None) -> str:
        """As `Client.detokenize`."""
        request = detokenize_request(token_ids, model)
        response = await self._answer(self._stub.Detokenize(request, timeout=timeout_s))
        return response.text

    async def list_models(self, *, timeout_s: float | None = None) -> list[ModelInfo]:
        """As `Client.list_models`."""
        request = generate_pb2.ListModelsRequest()
        response = await self._answer(self._stub.ListModels(request, timeout=timeout_s))
        return models(response.models)

    async def health(self, *, timeout_s: float | None = HEALTH_TIMEOUT_S) -> bool:
        """As `Client.health`."""
        stub = health_pb2_grpc.HealthStub(self._channel)
        # types-grpcio-health-checking leaves the stub's methods out
        call = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)  # type: ignore[attr-defined]
        return is_serving(await self._answer(call))

    async def _answer(self, call: Awaitable[Response]) -> Response:
        """What a call brings, or the error of who must act."""
        try:
            return await call
        except grpc.RpcError as error:
            raise to_error(error, self._server) from error
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            raise UnavailableError(_CLOSED) from None

    @property
    def _channel(self) -> grpc.aio.Channel:
        # A channel belongs to the event loop that runs when it is made; a client may be made before there is one.
        if self._opened is None:
            self._opened = grpc.aio.insecure_channel(
                self._server, options=OPTIONS, compression=grpc.Compression.NoCompression
            )
        return self._opened

    @property
    def _stub(self) -> "generate_pb2_grpc.GenerateServiceAsyncStub":
        return generate_pb2_grpc.GenerateServiceStub(self._channel)


def _is_cancelled() -> bool:
    """Whether a CancelledError means our task; gRPC raises the same where only the call was cancelled."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
