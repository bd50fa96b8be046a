"""The client for programs with threads."""

import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, Self, Unpack

import grpc

from pagekeeper.client.attempts import RESUME_FOR_S, Attempts
from pagekeeper.client.connection import Channels, Connection, Response
from pagekeeper.client.requests import detokenize_request, generate_request, tokenize_request
from pagekeeper.client.responses import CLOSED, BaseAnswer, first_text, models
from pagekeeper.client.values import Beam, Candidate, Delta, Message, ModelInfo, Prompt, Resume, Sampling
from pagekeeper.common.errors import PagekeeperError, UnavailableError
from pagekeeper.v1 import generate_pb2, generate_pb2_grpc


class _Call(Protocol):
    def __next__(self) -> generate_pb2.GenerateResponse: ...

    def cancel(self) -> bool: ...


class Answer(BaseAnswer, Iterator[Delta]):
    """The deltas of one request as they come. `next` reads one; a loop that is left early ends the request."""

    _call: _Call

    def __init__(
        self,
        request: generate_pb2.GenerateRequest,
        attempts: Attempts,
        channels: Channels,
        start: "Callable[[generate_pb2.GenerateRequest, float | None], Answer]",
    ) -> None:
        super().__init__(request, attempts)
        self._channels = channels
        # Holds the client too: a channel that is dropped closes, and ends what runs on it.
        self._start = start
        self._attempt()

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
        with self._final_failures():
            return self._read_on()

    def _read_on(self) -> generate_pb2.GenerateResponse | None:
        while not self._is_closed:
            try:
                response = next(self._call)
            except StopIteration:
                return None
            except grpc.RpcError as error:
                if self._is_closed or self.usage is not None:  # all has come but the end
                    return None
                self._pause(error)
                if not self._is_closed:
                    self._attempt()
            else:
                self._take(response)
                return response
        return None

    def _pause(self, error: grpc.RpcError) -> None:
        """Wait until it is time for another attempt, if there is to be one."""
        self._channels.pause(self._attempts.pause_s(error, self._tokens_received()))
        if self._channels.is_closed:
            raise UnavailableError(CLOSED, self._tokens_received()) from error

    def _attempt(self) -> None:
        address, left_s = self._attempts.next()
        stub = generate_pb2_grpc.GenerateServiceStub(self._channels.to(address))
        self._call = self._cancellable = stub.Generate(self._next_request(), timeout=left_s)
        if self._is_closed:  # by another thread meanwhile
            self._call.cancel()

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


class Client(Connection):
    """Asks a gateway for answers; may be used from several threads.

    A call whose connection is lost is made again, and an answer goes on where it was: its reader sees a pause. A server
    that this client has never reached is not waited for.

    `timeout_s` of any method: after so many seconds the call ends with a DeadlineError; None: the server decides.

    Args:
        server: HOST:PORT or unix:PATH of a gateway. Several, with commas between them, are tried in turn.
        resume_for_s: how long to try when the connection is lost, until the answer goes on; 0: not at all.
        on_retry: called with what has failed before each further attempt, on the thread that waits for the answer.
    """

    def __init__(
        self,
        server: str,
        *,
        resume_for_s: float = RESUME_FOR_S,
        on_retry: Callable[[PagekeeperError], None] | None = None,
    ) -> None:
        super().__init__(server, on_retry)
        self._resume_for_s = resume_for_s

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
            request_id: unique among the live requests; empty for one that the client makes.
            stream: False for one message with the whole answer.
            priority: lower is served earlier.
            resume: how far an earlier answer to this request got; only what follows comes. With the earlier one's
                `request_id` it also takes over, should that still be alive.
            timeout_s: for the whole answer.
            **sampling: fields of `Sampling`.

        Raises:
            InvalidRequestError: a value does not even fit its field.
            UnavailableError: the client is closed. Any other error comes out of the iteration.
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
        request.request_id = request.request_id or uuid.uuid4().hex
        return Answer(request, self._attempts(timeout_s), self._channels, self._start)

    def tokenize(
        self, prompt: str | Sequence[Message], *, model: str = "", timeout_s: float | None = None
    ) -> list[int]:
        """The token ids that `generate` would use for a text or a chat.

        Raises:
            RequestError: the prompt or the model's name is wrong.
            TryAgainError: the server cannot be asked.
        """
        request = tokenize_request(prompt, model)
        return list(self._ask_for(lambda stub, left_s: stub.Tokenize(request, timeout=left_s), timeout_s).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, model: str = "", timeout_s: float | None = None) -> str:
        """The text of an answer with these tokens. Raises as `tokenize` does."""
        request = detokenize_request(token_ids, model)
        return self._ask_for(lambda stub, left_s: stub.Detokenize(request, timeout=left_s), timeout_s).text

    def list_models(self, *, timeout_s: float | None = None) -> list[ModelInfo]:
        """The models that are served. Raises as `tokenize` does."""
        request = generate_pb2.ListModelsRequest()
        return models(self._ask_for(lambda stub, left_s: stub.ListModels(request, timeout=left_s), timeout_s).models)

    def _ask_for(
        self,
        call: Callable[[generate_pb2_grpc.GenerateServiceStub, float | None], Response],
        timeout_s: float | None,
    ) -> Response:
        def ask(channel: grpc.Channel, left_s: float | None) -> Response:
            return call(generate_pb2_grpc.GenerateServiceStub(channel), left_s)

        return self._ask(ask, self._attempts(timeout_s))

    def _attempts(self, timeout_s: float | None) -> Attempts:
        return Attempts(self._route, timeout_s, self._resume_for_s)
