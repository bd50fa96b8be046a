"""Every call ends with the status of what its handler raises; the table is pagekeeper.common.rpc_errors."""

import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError, Message

from gateway.authentication import Context
from pagekeeper.common.errors import FieldViolation, InvalidRequestError
from pagekeeper.common.rpc_errors import errors_as_status

# grpc's own class takes no parameters; only its stub has them.
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


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
        parse = handler.request_deserializer
        if parse is not None and not handler.request_streaming:
            parse = functools.partial(_parse, parse)
        serialisers = {
            "request_deserializer": parse,
            "response_serializer": handler.response_serializer,
        }
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(_answer_once(handler.unary_unary), **serialisers)
        if handler.unary_stream and inspect.isasyncgenfunction(handler.unary_stream):
            return grpc.unary_stream_rpc_method_handler(_answer_in_parts(handler.unary_stream), **serialisers)
        if handler.stream_stream and inspect.isasyncgenfunction(handler.stream_stream):
            return grpc.stream_stream_rpc_method_handler(_answer_in_parts(handler.stream_stream), **serialisers)
        return handler


class _Malformed:
    """In place of a request whose bytes are no message: grpc would answer UNKNOWN before any handler is asked."""


def _parse(parse: Callable[[bytes], Message], data: bytes) -> Message | _Malformed:
    try:
        return parse(data)
    except DecodeError:
        return _Malformed()


def _check(request: Message | _Malformed) -> None:
    if isinstance(request, _Malformed):
        raise InvalidRequestError(FieldViolation("request", "the bytes are not a message of this method"))


def _answer_once(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    async def answer(request: Message, context: Context) -> Message:
        async with errors_as_status(context):
            _check(request)
            response: Message = await method(request, context)
        return response

    return answer


def _answer_in_parts(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    async def answer(request: Message, context: Context) -> AsyncIterator[Message]:
        # Closed here and not by the garbage collector: what a handler holds ends in its `finally`.
        async with errors_as_status(context):
            _check(request)
            async with aclosing(method(request, context)) as responses:
                async for response in responses:
                    yield response

    return answer
