"""Errors as the status of a call: those that a caller can act on, and what he learns of any other."""

import contextlib
import secrets
from collections.abc import AsyncIterator
from typing import Any

import grpc
import structlog
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from pagekeeper.common.errors import InvalidRequestError, OverloadedError, SlowReaderError

_log = structlog.get_logger()


@contextlib.asynccontextmanager
async def errors_as_status(context: "grpc.aio.ServicerContext[Any, Any]") -> AsyncIterator[None]:
    """End the call with the status of the error that is raised within.

    Of an error that nobody expected the caller gets INTERNAL and an id; its text goes to the log under that id.
    """
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except InvalidRequestError as error:
        violations = [
            error_details_pb2.BadRequest.FieldViolation(field=violation.field, description=violation.description)
            for violation in error.violations
        ]
        details = error_details_pb2.BadRequest(field_violations=violations)
        await _abort(context, code_pb2.INVALID_ARGUMENT, error, details)
    except OverloadedError as error:
        delay = Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1000))
        retry = error_details_pb2.RetryInfo(retry_delay=delay)
        await _abort(context, code_pb2.RESOURCE_EXHAUSTED, error, _info("OVERLOADED"), retry)
    except SlowReaderError as error:
        await _abort(context, code_pb2.RESOURCE_EXHAUSTED, error, _info("SLOW_READER"))
    except Exception:  # noqa: BLE001 (the last resort of a call: it must not reach the caller as text)
        error_id = secrets.token_hex(8)
        _log.exception("unexpected error", error_id=error_id)
        await context.abort(grpc.StatusCode.INTERNAL, f"internal error {error_id}")


async def _abort(context: "grpc.aio.ServicerContext[Any, Any]", code: int, error: Exception, *details: Message) -> None:
    status = status_pb2.Status(code=code, message=str(error))
    for detail in details:
        status.details.add().Pack(detail)
    await context.abort_with_status(rpc_status.to_status(status))


def _info(reason: str) -> error_details_pb2.ErrorInfo:
    return error_details_pb2.ErrorInfo(reason=reason, domain="pagekeeper")
