"""The client of a cache manager's admin port."""

import contextlib
from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf.message import Message as ProtoMessage

from pagekeeper.client.connection import Connection
from pagekeeper.common.errors import ConfigurationError
from pagekeeper.status import to_error
from pagekeeper.v1 import admin_pb2, admin_pb2_grpc

_TIMEOUT_S = 10.0


class AdminClient(Connection):
    """Asks a cache manager for its numbers.

    Args:
        server: its admin port: one HOST:PORT or unix:PATH.

    Raises:
        ConfigurationError: there are several addresses.
    """

    def __init__(self, server: str) -> None:
        super().__init__(server)
        if (count := len(self._route.addresses)) > 1:
            raise ConfigurationError(
                f"server: {count} addresses in {server!r}, but an admin port is that of one cache manager; give one"
            )

    def stats(self) -> dict[str, Any]:
        """The numbers of GetStats, as nested dictionaries with the field names of admin.proto."""
        with self._errors():
            return _plain(self._stub.GetStats(admin_pb2.GetStatsRequest(), timeout=_TIMEOUT_S))

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
            response = self._stub.ListSessions(admin_pb2.ListSessionsRequest(), timeout=_TIMEOUT_S)
            return [_plain(session) for session in response.sessions]

    def sequences(self, *, with_block_tables: bool = False) -> list[dict[str, Any]]:
        """The open sequences, with the field names of SequenceInfo."""
        request = admin_pb2.ListSequencesRequest(with_block_tables=with_block_tables)
        with self._errors():
            slices = self._stub.ListSequences(request, timeout=_TIMEOUT_S)
            return [_plain(sequence) for part in slices for sequence in part.sequences]

    def blocks(self) -> list[dict[str, Any]]:
        """Every block but the null block, with the field names of BlockInfo; `state` is a word, such as "sealed"."""
        with self._errors():
            slices = self._stub.ListBlocks(admin_pb2.ListBlocksRequest(), timeout=_TIMEOUT_S)
            return [_plain(block) | {"state": _word(block.state)} for part in slices for block in part.blocks]

    def audit(self) -> list[str]:
        """One sentence for each broken invariant of the pool; empty when all hold."""
        with self._errors():
            return list(self._stub.Audit(admin_pb2.AuditRequest(), timeout=_TIMEOUT_S).violations)

    def flush(self) -> int:
        """Make what is cached unfindable, except what is in use; returns how many blocks that were."""
        with self._errors():
            return int(self._stub.Flush(admin_pb2.FlushRequest(), timeout=_TIMEOUT_S).flushed_blocks)

    @property
    def _stub(self) -> admin_pb2_grpc.AdminServiceStub:
        return admin_pb2_grpc.AdminServiceStub(self._channels.to(self._route.current))

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise a failed call as the error of who must act."""
        try:
            yield
        except grpc.RpcError as error:
            raise to_error(error, self._route.server) from error


def _word(state: "admin_pb2.BlockState.ValueType") -> str:
    return admin_pb2.BlockState.Name(state).removeprefix("BLOCK_STATE_").lower()


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
