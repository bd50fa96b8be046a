"""A failed call as one of pagekeeper.common.errors; the other way round is common/rpc_errors.py."""

import enum
import re
from typing import TypeVar, cast

import grpc
from google.protobuf.message import DecodeError, Message
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
    RequestError,
    SlowReaderError,
    UnavailableError,
    UnknownModelError,
)

M = TypeVar("M", bound=Message)

# What gRPC itself says of a message over the limit of either side, which no handler has seen.
_TOO_LARGE = re.compile(r"message larger than max \((\d+) vs\.? (\d+)\)")
# What gRPC says when there was no connection on which the call could have been sent.
_NOT_CONNECTED = re.compile(r"failed to connect to all addresses|errors resolving|DNS resolution failed")
# Where a server says that it is exhausted, but not for how long.
_RETRY_AFTER_S = 1.0


class Failure(enum.Enum):
    """What a failed call means for whoever would make it again.

    REFUSED: there is no connection; no server has seen the call.
    LOST: the connection broke, or someone between cut it; a server may still be at work on the call.
    UNAVAILABLE: the server says that it cannot do this now.
    DRAINING: the server says that it ends; another can do this now, or the one that comes after it.
    OVERLOADED: the server's queue is full, and it says when to come back.
    SLOW_READER: the server has ended a stream that was not read.
    DUPLICATE: the request id is in use, or another call has taken this one's place.
    FINAL: the same call would fail again, or has had the time that it was given.
    """

    REFUSED = enum.auto()
    LOST = enum.auto()
    UNAVAILABLE = enum.auto()
    DRAINING = enum.auto()
    OVERLOADED = enum.auto()
    SLOW_READER = enum.auto()
    DUPLICATE = enum.auto()
    FINAL = enum.auto()


def failure_of(error: grpc.RpcError) -> Failure:
    """What a failed call means for another attempt."""
    status = _rich_status(error)
    reason = _detail(status, error_details_pb2.ErrorInfo).reason
    match error.code():
        case grpc.StatusCode.UNAVAILABLE if reason == "DRAINING":
            return Failure.DRAINING
        case grpc.StatusCode.UNAVAILABLE if reason:
            return Failure.UNAVAILABLE
        case grpc.StatusCode.UNAVAILABLE if _NOT_CONNECTED.match(error.details() or ""):
            return Failure.REFUSED
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
            return Failure.LOST
        case grpc.StatusCode.RESOURCE_EXHAUSTED if reason == "SLOW_READER":
            return Failure.SLOW_READER
        case grpc.StatusCode.RESOURCE_EXHAUSTED if _detail(status, error_details_pb2.RetryInfo).HasField("retry_delay"):
            return Failure.OVERLOADED
        case grpc.StatusCode.ALREADY_EXISTS:
            return Failure.DUPLICATE
        case _:
            return Failure.FINAL


def to_error(
    error: grpc.RpcError, server: str, *, has_begun: bool = False, tokens_received: int = 0
) -> PagekeeperError:
    """The error that says who must act.

    Args:
        error: a failed call: what the gRPC stubs raise.
        server: the address that was called, for the message.
        has_begun: whether part of the answer had come.
        tokens_received: how much of the answer the client has, resumed tokens included.
    """
    code, text = error.code(), " ".join((error.details() or "").split())
    status = _rich_status(error)
    match code:
        case grpc.StatusCode.INVALID_ARGUMENT:
            violations = _detail(status, error_details_pb2.BadRequest).field_violations
            named = [FieldViolation(violation.field, violation.description) for violation in violations]
            return InvalidRequestError(*named or [FieldViolation("request", text)])
        case grpc.StatusCode.NOT_FOUND:
            return UnknownModelError(text)
        case grpc.StatusCode.ALREADY_EXISTS:
            return DuplicateRequestError(text)
        case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
            return RequestError(f"{server} does not allow this: {text}")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return _exhausted(text, status)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineError("the answer took longer than allowed; allow more time or ask for fewer tokens")
        case grpc.StatusCode.UNAVAILABLE if _detail(status, error_details_pb2.ErrorInfo).reason:
            return UnavailableError(text, tokens_received)
        case grpc.StatusCode.UNAVAILABLE if has_begun:
            text = f"the connection to {server} broke after {tokens_received} tokens; ask again, or resume with them"
            return UnavailableError(text, tokens_received)
        case grpc.StatusCode.UNAVAILABLE:
            return CannotConnectError(f"cannot connect to {server}; `pagekeeper up` starts a server")
        case grpc.StatusCode.CANCELLED:
            return UnavailableError(f"the call was ended before its answer: {text}", tokens_received)
        case grpc.StatusCode.UNIMPLEMENTED:
            return CannotConnectError(f"{server} does not offer this; the gateway generates, the admin port has stats")
        case _:
            return BugError(f"{code.name}: {text}")


def _exhausted(text: str, status: status_pb2.Status) -> PagekeeperError:
    too_large = _TOO_LARGE.search(text)
    if too_large:
        size, limit = (int(number) for number in too_large.groups())
        return InvalidRequestError(
            FieldViolation("request", f"a message of {size:,} bytes; at most {limit:,} are taken")
        )
    if _detail(status, error_details_pb2.ErrorInfo).reason == "SLOW_READER":
        return SlowReaderError(text)
    retry = _detail(status, error_details_pb2.RetryInfo)
    is_known = retry.HasField("retry_delay")
    return OverloadedError(text, retry.retry_delay.ToTimedelta().total_seconds() if is_known else _RETRY_AFTER_S)


def _rich_status(error: grpc.RpcError) -> status_pb2.Status:
    """The google.rpc status of a failed call; empty when there is none, or one that contradicts the call's."""
    try:
        return rpc_status.from_call(cast("grpc.Call", error)) or status_pb2.Status()
    except (ValueError, DecodeError):
        return status_pb2.Status()


def _detail(status: status_pb2.Status, kind: type[M]) -> M:
    """The detail of one kind, empty when the status carries none."""
    found = kind()
    for part in status.details:
        if part.Unpack(found):
            break
    return found
