"""Errors as the status of a call: the one table, and the one place where an exception becomes an answer."""

import contextlib
import uuid
from collections.abc import AsyncIterator
from typing import Any

import grpc
import structlog
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from pagekeeper.common.errors import (
    DeadlineError,
    DrainingError,
    DuplicateRequestError,
    InvalidRequestError,
    OverloadedError,
    PagekeeperError,
    SlowReaderError,
    UnavailableError,
    UnknownModelError,
)

_DOMAIN = "pagekeeper"

log = structlog.get_logger()


@contextlib.asynccontextmanager
async def errors_as_status(context: "grpc.aio.ServicerContext[Any, Any]") -> AsyncIterator[None]:
    """End the call with the status of the error that is raised within."""
    try:
        yield
    except grpc.aio.BaseError:  # gRPC's own: the call is over, and it logs what else is wrong
        raise
    except Exception as error:  # noqa: BLE001 - nothing of an unexpected exception may reach the caller
        await context.abort_with_status(rpc_status.to_status(to_status(error)))


def to_status(error: Exception) -> status_pb2.Status:
    """The status of a failed call, with google.rpc details.

    Whatever is not an error of the table is our fault: its text goes to the log under an id, which the client
    gets.
    """
    match error:
        case InvalidRequestError():
            violations = [
                error_details_pb2.BadRequest.FieldViolation(field=violation.field, description=violation.description)
                for violation in error.violations
            ]
            return _status(error, code_pb2.INVALID_ARGUMENT, error_details_pb2.BadRequest(field_violations=violations))
        case UnknownModelError():
            return _status(error, code_pb2.NOT_FOUND, _info("UNKNOWN_MODEL"))
        case DuplicateRequestError():
            return _status(error, code_pb2.ALREADY_EXISTS, _info("DUPLICATE_REQUEST"))
        case OverloadedError():
            delay = Duration()
            delay.FromMilliseconds(round(error.retry_after_s * 1000))
            retry = error_details_pb2.RetryInfo(retry_delay=delay)
            return _status(error, code_pb2.RESOURCE_EXHAUSTED, _info("OVERLOADED"), retry)
        case SlowReaderError():
            return _status(error, code_pb2.RESOURCE_EXHAUSTED, _info("SLOW_READER"))
        case UnavailableError():
            reason = "DRAINING" if isinstance(error, DrainingError) else "UNAVAILABLE"
            info = _info(reason, tokens_emitted=str(error.tokens_emitted))
            return _status(error, code_pb2.UNAVAILABLE, info)
        case DeadlineError():
            return _status(error, code_pb2.DEADLINE_EXCEEDED, _info("DEADLINE"))
        case _:
            error_id = uuid.uuid4().hex
            log.error("call failed", error_id=error_id, exc_info=error)
            text = PagekeeperError(f"internal error {error_id}; the server's log explains it")
            return _status(text, code_pb2.INTERNAL, _info("INTERNAL", error_id=error_id))


def _status(error: PagekeeperError, code: int, *details: Message) -> status_pb2.Status:
    status = status_pb2.Status(code=code, message=str(error))
    for detail in details:
        status.details.add().Pack(detail)
    return status


def _info(reason: str, **metadata: str) -> error_details_pb2.ErrorInfo:
    return error_details_pb2.ErrorInfo(reason=reason, domain=_DOMAIN, metadata=metadata)
