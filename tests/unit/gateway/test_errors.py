"""The status table."""

from collections.abc import AsyncIterator

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2

from gateway.errors import ErrorInterceptor
from pagekeeper.common.errors import (
    BugError,
    DeadlineError,
    DrainingError,
    DuplicateRequestError,
    FieldViolation,
    InvalidRequestError,
    OverloadedError,
    SlowReaderError,
    UnavailableError,
    UnknownModelError,
)
from pagekeeper.common.rpc_errors import to_status


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (OverloadedError("full", 1.5), code_pb2.RESOURCE_EXHAUSTED, "OVERLOADED"),
        (SlowReaderError("slow"), code_pb2.RESOURCE_EXHAUSTED, "SLOW_READER"),
        (UnavailableError("gone", 7), code_pb2.UNAVAILABLE, "UNAVAILABLE"),
        (DrainingError(), code_pb2.UNAVAILABLE, "DRAINING"),
        (DeadlineError("late"), code_pb2.DEADLINE_EXCEEDED, "DEADLINE"),
        (UnknownModelError("who"), code_pb2.NOT_FOUND, "UNKNOWN_MODEL"),
        (DuplicateRequestError("twice"), code_pb2.ALREADY_EXISTS, "DUPLICATE_REQUEST"),
    ],
)
def test_each_error_has_its_code_its_text_and_a_reason(error: Exception, code: int, reason: str) -> None:
    status = to_status(error)
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (status.code, status.message, info.reason, info.domain) == (code, str(error), reason, "pagekeeper")


def test_details_say_what_a_program_needs() -> None:
    retry, info = error_details_pb2.RetryInfo(), error_details_pb2.ErrorInfo()
    assert to_status(OverloadedError("full", 1.5)).details[1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 1500
    assert to_status(UnavailableError("gone", 7)).details[0].Unpack(info)
    assert info.metadata["tokens_emitted"] == "7"


def test_each_wrong_field_is_a_violation() -> None:
    request = error_details_pb2.BadRequest()
    status = to_status(InvalidRequestError(FieldViolation("a", "one"), FieldViolation("b[1]", "two")))
    assert status.code == code_pb2.INVALID_ARGUMENT
    assert status.details[0].Unpack(request)
    assert [(v.field, v.description) for v in request.field_violations] == [("a", "one"), ("b[1]", "two")]


@pytest.mark.parametrize("error", [BugError("secret"), ValueError("secret"), KeyError("secret")])
def test_case_36_the_text_of_a_fault_of_ours_stays_here(error: Exception) -> None:
    """Case 36: INTERNAL with an id; the text goes to the log."""
    status = to_status(error)
    assert status.code == code_pb2.INTERNAL
    assert "secret" not in str(status)
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.metadata["error_id"] in status.message


async def test_what_a_handler_holds_ends_with_its_stream() -> None:
    ended: list[str] = []

    async def handle(request: object, context: object) -> AsyncIterator[str]:
        try:
            while True:
                yield "part"
        finally:
            ended.append("handler")

    async def find_handler(details: object) -> grpc.RpcMethodHandler:
        return grpc.unary_stream_rpc_method_handler(handle)

    wrapped = await ErrorInterceptor().intercept_service(find_handler, None)
    responses = wrapped.unary_stream(None, None)
    assert await anext(responses) == "part"
    await responses.aclose()
    assert ended == ["handler"]
