"""A synchronous client of the gateway and of the cache manager's admin port.

    with Client("127.0.0.1:50051") as client:
        answer = client.generate([Message("user", "What is the capital of France?")], temperature=0)
        for delta in answer:
            print(delta.text, end="")
        print(answer.usage)

Every error is one of pagekeeper.common.errors, named by who must act.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

import grpc
from google.protobuf.message import Message as ProtoMessage
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagekeeper.common.errors import FieldViolation, InvalidRequestError
from pagekeeper.common.sockets import CHANNEL_OPTIONS
from pagekeeper.status import to_error
from pagekeeper.v1 import admin_pb2, admin_pb2_grpc, generate_pb2, generate_pb2_grpc, types_pb2

_FINISH_REASONS: dict[int, str | None] = {
    types_pb2.FINISH_REASON_UNSPECIFIED: None,
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
}
_ADMIN_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Message:
    """One turn of a chat; `role` is what the model's template knows: "system", "user", "assistant"."""

    role: str
    content: str


@dataclass(frozen=True)
class Delta:
    """What one candidate gained: `token_ids` begin at `position` of its answer."""

    index: int
    position: int
    token_ids: list[int]
    text: str
    finish_reason: str | None


@dataclass(frozen=True)
class Usage:
    """Tokens of one request, over all its candidates; see types.proto for each."""

    prompt_tokens: int
    cached_tokens: int
    resumed_tokens: int
    recomputed_tokens: int
    completion_tokens: int


class Sampling(TypedDict, total=False):
    """How tokens are chosen and when to stop; what is absent or None is left to the server. See types.proto."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    max_tokens: int | None
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    n: int | None


class Answer(Iterator[Delta]):
    """The deltas of one request as they come; leaving its `with` block, or `cancel`, ends the request.

    Attributes:
        seed: the seed in use; None until the first delta.
        usage: token counts; None until the last delta has come.
    """

    def __init__(self, call: Iterator[generate_pb2.GenerateResponse], server: str) -> None:
        self._call = call
        self._server = server
        self._pending: list[Delta] = []
        self._num_tokens = 0
        self.seed: int | None = None
        self.usage: Usage | None = None

    def __next__(self) -> Delta:
        while not self._pending:
            try:
                self._receive(next(self._call))
            except grpc.RpcError as error:
                raise to_error(error, self._server, self._num_tokens) from error
        return self._pending.pop(0)

    def _receive(self, response: generate_pb2.GenerateResponse) -> None:
        if response.HasField("seed"):
            self.seed = response.seed
        if response.HasField("usage"):
            self.usage = Usage(**_plain(response.usage))
        for delta in response.deltas:
            self._num_tokens += len(delta.token_ids)
            finish = _FINISH_REASONS[delta.finish_reason]
            self._pending.append(Delta(delta.index, delta.position, list(delta.token_ids), delta.text, finish))

    def cancel(self) -> None:
        """End the request; the server gives its blocks back."""
        if isinstance(self._call, grpc.RpcContext):
            self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.cancel()


class _Connection:
    """A lazily connected channel that closes with its `with` block."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._channel = grpc.insecure_channel(server, options=CHANNEL_OPTIONS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; what is still running on it is cancelled."""
        self._channel.close()

    def serving(self) -> bool:
        """Whether the server says that it can serve.

        Raises:
            PagekeeperError: it cannot be asked.
        """
        stub = health_pb2_grpc.HealthStub(self._channel)
        try:
            # types-grpcio-health-checking leaves the stub's methods out
            response = stub.Check(health_pb2.HealthCheckRequest(), timeout=_ADMIN_TIMEOUT_S)  # type: ignore[attr-defined]
        except grpc.RpcError as error:
            raise to_error(error, self._server) from error
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


class Client(_Connection):
    """Asks a gateway for answers."""

    def generate(
        self,
        prompt: str | Sequence[int] | Sequence[Message],
        *,
        model: str = "",
        request_id: str = "",
        stream: bool = True,
        timeout_s: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> Answer:
        """Start one request; the result yields its deltas.

        Args:
            prompt: text as it is, token ids, or the messages of a chat.
            model: empty for the one that is served.
            request_id: unique among the live requests; empty to let the server choose.
            stream: False for one message with the whole answer.
            timeout_s: after so many seconds the request ends with a DeadlineError.
            **sampling: fields of `Sampling`.

        Raises:
            InvalidRequestError: a value does not even fit its field. Any other error comes out of the iteration.
        """
        request = generate_pb2.GenerateRequest(model=model, request_id=request_id, stream=stream)
        _set_prompt(request, prompt)
        _set_sampling(request.sampling, sampling)
        call = generate_pb2_grpc.GenerateServiceStub(self._channel).Generate(request, timeout=timeout_s)
        return Answer(call, self._server)


class AdminClient(_Connection):
    """Asks a cache manager for its numbers."""

    def stats(self) -> dict[str, Any]:
        """The numbers of GetStats, as nested dictionaries with the field names of admin.proto."""
        with self._errors():
            return _plain(self._stub.GetStats(admin_pb2.GetStatsRequest(), timeout=_ADMIN_TIMEOUT_S))

    def watch_stats(self, interval_s: float = 1.0) -> Iterator[dict[str, Any]]:
        """The numbers of `stats`, now and every `interval_s` seconds (0.1 to 3600), for as long as one iterates."""
        call = self._stub.WatchStats(admin_pb2.WatchStatsRequest(interval_seconds=interval_s))
        try:
            with self._errors():
                for response in call:
                    yield _plain(response.stats)
        finally:
            call.cancel()

    def sessions(self) -> list[dict[str, Any]]:
        """The attached runners, with the field names of SessionInfo."""
        with self._errors():
            response = self._stub.ListSessions(admin_pb2.ListSessionsRequest(), timeout=_ADMIN_TIMEOUT_S)
            return [_plain(session) for session in response.sessions]

    def sequences(self, *, with_block_tables: bool = False) -> list[dict[str, Any]]:
        """The open sequences, with the field names of SequenceInfo."""
        request = admin_pb2.ListSequencesRequest(with_block_tables=with_block_tables)
        with self._errors():
            slices = self._stub.ListSequences(request, timeout=_ADMIN_TIMEOUT_S)
            return [_plain(sequence) for part in slices for sequence in part.sequences]

    def blocks(self) -> list[dict[str, Any]]:
        """Every block but the null block, with the field names of BlockInfo; `state` is a word, such as "sealed"."""
        with self._errors():
            slices = self._stub.ListBlocks(admin_pb2.ListBlocksRequest(), timeout=_ADMIN_TIMEOUT_S)
            return [_plain(block) | {"state": _word(block.state)} for part in slices for block in part.blocks]

    def audit(self) -> list[str]:
        """One sentence for each broken invariant of the pool; empty when all hold."""
        with self._errors():
            return list(self._stub.Audit(admin_pb2.AuditRequest(), timeout=_ADMIN_TIMEOUT_S).violations)

    def flush(self) -> int:
        """Make what is cached unfindable, except what is in use; returns how many blocks that were."""
        with self._errors():
            return int(self._stub.Flush(admin_pb2.FlushRequest(), timeout=_ADMIN_TIMEOUT_S).flushed_blocks)

    @property
    def _stub(self) -> "admin_pb2_grpc.AdminServiceStub":
        return admin_pb2_grpc.AdminServiceStub(self._channel)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise to_error(error, self._server) from error


def _word(state: "admin_pb2.BlockState.ValueType") -> str:
    return admin_pb2.BlockState.Name(state).removeprefix("BLOCK_STATE_").lower()


def _set_prompt(request: generate_pb2.GenerateRequest, prompt: str | Sequence[int] | Sequence[Message]) -> None:
    if isinstance(prompt, str):
        request.text = prompt
        return
    messages = [part for part in prompt if isinstance(part, Message)]
    if messages:
        request.chat.messages.extend(generate_pb2.ChatMessage(role=m.role, content=m.content) for m in messages)
    else:
        token_ids = [part for part in prompt if not isinstance(part, Message)]
        request.token_ids.CopyFrom(generate_pb2.TokenIds(token_ids=token_ids))


def _set_sampling(params: types_pb2.SamplingParams, sampling: Sampling) -> None:
    for name, value in sampling.items():
        if value is None:
            continue
        try:
            if isinstance(value, (list, tuple)):
                getattr(params, name).extend(value)
            else:
                setattr(params, name, value)
        except (ValueError, TypeError) as error:
            raise InvalidRequestError(FieldViolation(f"sampling.{name}", f"{value!r} does not fit: {error}")) from error


def _plain(message: ProtoMessage) -> dict[str, Any]:
    """Every field by its name in the proto, unset ones too; unlike in proto JSON, 64-bit integers stay integers."""

    def convert(value: Any) -> Any:  # noqa: ANN401 - a proto field holds any type
        return _plain(value) if isinstance(value, ProtoMessage) else value

    return {
        field.name: [convert(item) for item in getattr(message, field.name)]
        if field.is_repeated
        else convert(getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
    }
