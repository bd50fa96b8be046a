"""Every call ends with the status of what its handler raises; the table is pagekeeper.common.rpc_errors."""

import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import Message

from gateway.authentication import Context
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
        async with errors_as_status(context):
            response: Message = await method(request, context)
        return response

    return answer


def _answer_in_parts(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    async def answer(request: Message, context: Context) -> AsyncIterator[Message]:
        # Closed here and not by the garbage collector: what a handler holds ends in its `finally`.
        async with errors_as_status(context), aclosing(method(request, context)) as responses:
            async for response in responses:
                yield response

    return answer
