"""A failed call as one of pagekeeper.common.errors; the other way round is gateway/errors.py."""

from typing import TypeVar, cast

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from pagekeeper.common.errors import (
    BugError,
    CannotConnectError,
    DeadlineError,
    DuplicateRequestError,
    FieldViolation,
    InvalidRequestError,
    OverloadedError,
    PagekeeperError,
    SlowReaderError,
    UnavailableError,
    UnknownModelError,
)

M = TypeVar("M", bound=Message)


def to_error(error: grpc.RpcError, server: str, tokens_received: int = 0) -> PagekeeperError:
    """The error that says who must act.

    Args:
        error: a failed call: what the gRPC stubs raise.
        server: the address that was called, for the message.
        tokens_received: how much of the answer had come.
    """
    code, text = error.code(), error.details() or ""
    status = rpc_status.from_call(cast("grpc.Call", error)) or status_pb2.Status()
    match code:
        case grpc.StatusCode.INVALID_ARGUMENT:
            violations = _detail(status, error_details_pb2.BadRequest).field_violations
            named = [FieldViolation(violation.field, violation.description) for violation in violations]
            return InvalidRequestError(*named or [FieldViolation("request", text)])
        case grpc.StatusCode.NOT_FOUND:
            return UnknownModelError(text)
        case grpc.StatusCode.ALREADY_EXISTS:
            return DuplicateRequestError(text)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            retry = _detail(status, error_details_pb2.RetryInfo)
            if not retry.HasField("retry_delay"):
                return SlowReaderError(text)
            return OverloadedError(text, retry.retry_delay.ToTimedelta().total_seconds())
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineError("the answer took longer than allowed; allow more time or ask for fewer tokens")
        case grpc.StatusCode.UNAVAILABLE if tokens_received or _detail(status, error_details_pb2.ErrorInfo).reason:
            return UnavailableError(text, tokens_received)
        case grpc.StatusCode.UNAVAILABLE:
            return CannotConnectError(f"cannot connect to {server}; `pagekeeper up` starts a server")
        case grpc.StatusCode.UNIMPLEMENTED:
            return CannotConnectError(f"{server} does not offer this; the gateway generates, the admin port has stats")
        case _:
            return BugError(f"{code.name}: {text}")


def _detail(status: status_pb2.Status, kind: type[M]) -> M:
    """The detail of one kind, empty when the status carries none."""
    found = kind()
    for part in status.details:
        if part.Unpack(found):
            break
    return found
