"""The client for programs with threads."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, Self, Unpack

import grpc
import grpc.experimental
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagekeeper.client.channel import OPTIONS
from pagekeeper.client.requests import detokenize_request, generate_request, tokenize_request
from pagekeeper.client.responses import BaseAnswer, first_text, is_serving, models
from pagekeeper.client.values import Beam, Candidate, Delta, Message, ModelInfo, Prompt, Resume, Sampling
from pagekeeper.status import to_error
from pagekeeper.v1 import generate_pb2, generate_pb2_grpc

HEALTH_TIMEOUT_S = 10.0
# Whoever reads a stream also does its work, where by default a thread of the channel would. That thread's streams wait
# for ever (grpcio 1.85) when the first attempt ends UNAVAILABLE and the next one cannot connect.
_OPTIONS = [*OPTIONS, (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1)]


class _Call(Protocol):
    def __next__(self) -> generate_pb2.GenerateResponse: ...

    def cancel(self) -> bool: ...


class Answer(BaseAnswer, Iterator[Delta]):
    """The deltas of one request as they come. `next` reads one; a loop that is left early ends the request."""

    def __init__(
        self,
        call: _Call,
        request: generate_pb2.GenerateRequest,
        server: str,
        start: "Callable[[generate_pb2.GenerateRequest, float | None], Answer]",
    ) -> None:
        super().__init__(call, request, server)
        self._call = call
        # Holds the client too: a channel that is dropped closes, and ends what runs on it.
        self._start = start

    def collect(self) -> list[Candidate]:
        """Wait for the whole answer; returns its candidates in order.

        Raises:
            PagekeeperError: it failed; what has come is in `candidates`.
        """
        for _ in self:
            pass
        return self._in_order()

    def text(self) -> str:
        """Wait for the whole answer; returns the text of its first candidate. Raises as `collect` does."""
        return first_text(self.collect())

    def branch(
        self,
        position: int,
        *,
        candidate: int = 0,
        request_id: str = "",
        timeout_s: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> "Answer":
        """Start another request that goes on from a position of this answer, which may still be running.

        What is known up to there is found in the cache, or computed again where the cache has it no more. The new
        answer's `branch_text` and the text of its candidates make the whole text.

        Args:
            position: how many of the candidate's tokens to keep, resumed ones included.
            candidate: which one.
            request_id: of the new request.
            timeout_s: for the whole new answer.
            **sampling: what is to be another than in this request; None for the server's own value. The seed is
                another in any case, unless it is given.

        Raises:
            InvalidRequestError: the candidate has not so many tokens yet; or as for `Client.generate`.
        """
        return self._start(self._branch(position, candidate, request_id, sampling), timeout_s)

    def intermediate(self) -> Iterator[list[Beam]]:
        """Read a beam search with `intermediate`: yields its running beams whenever they have changed.

        The hypotheses are in `candidates` afterwards. A loop that is left early ends the request.
        """
        try:
            while (response := self._read()) is not None:
                if response.beams:
                    yield self.beams
        finally:
            self.close()

    def __next__(self) -> Delta:
        while not self._pending:
            if self._read() is None:
                raise StopIteration
        return self._pending.popleft()

    def _read(self) -> generate_pb2.GenerateResponse | None:
        """Take in the next message; None: there is none."""
        try:
            response = next(self._call)
        except StopIteration:
            return None
        except grpc.RpcError as error:
            if self._is_closed and error.code() is grpc.StatusCode.CANCELLED:
                return None
            raise self._failure(error) from error
        self._take(response)
        return response

    def __iter__(self) -> Iterator[Delta]:
        return _Loop(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Loop(Iterator[Delta]):
    """A loop over an answer. Python drops it as soon as the loop is left, which nothing else would tell us."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def __next__(self) -> Delta:
        return next(self._answer)

    def __del__(self) -> None:
        self._answer.close()


class Connection:
    """A channel that connects when it is first used and closes with its `with` block.

    Args:
        server: HOST:PORT, or unix:PATH.
    """

    def __init__(self, server: str) -> None:
        self._server = server
        self._channel = grpc.insecure_channel(server, options=_OPTIONS, compression=grpc.Compression.NoCompression)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; what still runs on it is ended."""
        self._channel.close()

    def health(self, *, timeout_s: float | None = HEALTH_TIMEOUT_S) -> bool:
        """Whether the server says that it can serve.

        Raises:
            TryAgainError: it cannot be asked.
        """
        stub = health_pb2_grpc.HealthStub(self._channel)
        with self._errors():
            # types-grpcio-health-checking leaves the stub's methods out
            return is_serving(stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s))  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise a failed call as the error of who must act."""
        try:
            yield
        except grpc.RpcError as error:
            raise to_error(error, self._server) from error


class Client(Connection):
    """Asks a gateway for answers; may be used from several threads.

    `timeout_s` of any method: after so many seconds the call ends with a DeadlineError; None: the server decides.
    """

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
    ) -> Answer:
        """Start one request; the result yields its deltas.

        Args:
            prompt: text as it is, token ids, or the messages of a chat.
            model: empty for the one that is served.
            request_id: unique among the live requests; empty to let the server choose.
            stream: False for one message with the whole answer.
            priority: lower is served earlier.
            resume: how far an earlier stream of this request got; only what follows comes. With the earlier stream's
                `request_id` it also takes over, should that stream still be alive.
            timeout_s: for the whole answer.
            **sampling: fields of `Sampling`.

        Raises:
            InvalidRequestError: a value does not even fit its field. Any other error comes out of the iteration.
        """
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

    def _start(self, request: generate_pb2.GenerateRequest, timeout_s: float | None) -> Answer:
        return Answer(self._stub.Generate(request, timeout=timeout_s), request, self._server, self._start)

    def tokenize(
        self, prompt: str | Sequence[Message], *, model: str = "", timeout_s: float | None = None
    ) -> list[int]:
        """The token ids that `generate` would use for a text or a chat.

        Raises:
            RequestError: the prompt or the model's name is wrong.
            TryAgainError: the server cannot be asked.
        """
        request = tokenize_request(prompt, model)
        with self._errors():
            return list(self._stub.Tokenize(request, timeout=timeout_s).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, model: str = "", timeout_s: float | None = None) -> str:
        """The text of an answer with these tokens. Raises as `tokenize` does."""
        request = detokenize_request(token_ids, model)
        with self._errors():
            return self._stub.Detokenize(request, timeout=timeout_s).text

    def list_models(self, *, timeout_s: float | None = None) -> list[ModelInfo]:
        """The models that are served. Raises as `tokenize` does."""
        with self._errors():
            return models(self._stub.ListModels(generate_pb2.ListModelsRequest(), timeout=timeout_s).models)

    @property
    def _stub(self) -> generate_pb2_grpc.GenerateServiceStub:
        return generate_pb2_grpc.GenerateServiceStub(self._channel)
