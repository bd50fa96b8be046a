"""Errors as status codes: the one table, and the one place where an exception becomes an answer."""

import functools
import inspect
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeAlias

import grpc
import structlog
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from gateway.authentication import Context
from pagekeeper.common.errors import (
    DeadlineError,
    DuplicateRequestError,
    InvalidRequestError,
    OverloadedError,
    PagekeeperError,
    SlowReaderError,
    UnavailableError,
    UnknownModelError,
)

_DOMAIN = "pagekeeper"
# grpc's own class takes no parameters; only its stub has them.
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

log = structlog.get_logger()


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
            info = _info("UNAVAILABLE", tokens_emitted=str(error.tokens_emitted))
            return _status(error, code_pb2.UNAVAILABLE, info)
        case DeadlineError():
            return _status(error, code_pb2.DEADLINE_EXCEEDED, _info("DEADLINE"))
        case _:
            error_id = uuid.uuid4().hex
            log.error("call failed", error_id=error_id, exc_info=error)
            text = PagekeeperError(f"internal error; the server's log explains it under {error_id}")
            return _status(text, code_pb2.INTERNAL, _info("INTERNAL", error_id=error_id))


def _status(error: PagekeeperError, code: int, *details: Message) -> status_pb2.Status:
    status = status_pb2.Status(code=code, message=str(error))
    for detail in details:
        status.details.add().Pack(detail)
    return status


def _info(reason: str, **metadata: str) -> error_details_pb2.ErrorInfo:
    return error_details_pb2.ErrorInfo(reason=reason, domain=_DOMAIN, metadata=metadata)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Ends every call whose handler raises with the status of the exception."""

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "_Handler | None":
        """Wrap the method's handler; one that answers by `context.write` has no stream of its own to wrap."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        serialisers = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(_answer_once(handler.unary_unary), **serialisers)
        if handler.unary_stream and inspect.isasyncgenfunction(handler.unary_stream):
            return grpc.unary_stream_rpc_method_handler(_answer_in_parts(handler.unary_stream), **serialisers)
        if handler.stream_stream and inspect.isasyncgenfunction(handler.stream_stream):
            return grpc.stream_stream_rpc_method_handler(_answer_in_parts(handler.stream_stream), **serialisers)
        return handler


def _answer_once(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    async def answer(request: Message, context: Context) -> Message:
        try:
            response: Message = await method(request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 - nothing of an unexpected exception may reach the client
            await _abort(context, error)
        return response

    return answer


def _answer_in_parts(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    async def answer(request: Message, context: Context) -> AsyncIterator[Message]:
        try:
            async for response in method(request, context):
                yield response
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 - nothing of an unexpected exception may reach the client
            await _abort(context, error)

    return answer


async def _abort(context: Context, error: Exception) -> NoReturn:
    await context.abort_with_status(rpc_status.to_status(to_status(error)))
