"""What the clients make of a failed call."""

from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2

from pagekeeper.common import errors
from pagekeeper.status import Failure, failure_of, to_error
from tests.unit.cli.fakes import failure
from tests.unit.client.failed_call import FailedCall

CODE = grpc.StatusCode
SERVER = "127.0.0.1:50051"
FIELD = error_details_pb2.BadRequest.FieldViolation
RETRY = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=1, nanos=500_000_000))


def info(reason: str) -> error_details_pb2.ErrorInfo:
    return error_details_pb2.ErrorInfo(reason=reason)


def error_of(code: grpc.StatusCode, text: str, *details: Message, **progress: Any) -> errors.PagekeeperError:
    rich = failure(code, text, *details).SerializeToString() if details else None
    return to_error(FailedCall(code, text, rich), SERVER, **progress)


@pytest.mark.parametrize(
    ("code", "details", "expected", "words"),
    [
        (CODE.INVALID_ARGUMENT, [], errors.InvalidRequestError, "request: the text"),
        (CODE.NOT_FOUND, [info("UNKNOWN_MODEL")], errors.UnknownModelError, "the text"),
        (CODE.ALREADY_EXISTS, [info("DUPLICATE_REQUEST")], errors.DuplicateRequestError, "the text"),
        (CODE.RESOURCE_EXHAUSTED, [info("SLOW_READER")], errors.SlowReaderError, "the text"),
        (CODE.RESOURCE_EXHAUSTED, [], errors.OverloadedError, "the text"),
        (CODE.UNAVAILABLE, [info("UNAVAILABLE")], errors.UnavailableError, "the text"),
        (CODE.UNAVAILABLE, [info("DRAINING")], errors.UnavailableError, "the text"),
        (CODE.UNAVAILABLE, [], errors.CannotConnectError, f"cannot connect to {SERVER}"),
        (CODE.UNIMPLEMENTED, [], errors.CannotConnectError, SERVER),
        (CODE.CANCELLED, [], errors.UnavailableError, "the text"),
        (CODE.DEADLINE_EXCEEDED, [info("DEADLINE")], errors.DeadlineError, "allow more time"),
        (CODE.UNAUTHENTICATED, [], errors.RequestError, "the text"),
        (CODE.PERMISSION_DENIED, [], errors.RequestError, "the text"),
        (CODE.INTERNAL, [info("INTERNAL")], errors.BugError, "INTERNAL: the text"),
        *[
            (code, [], errors.BugError, f"{code.name}: the text")
            for code in (CODE.UNKNOWN, CODE.FAILED_PRECONDITION, CODE.ABORTED, CODE.OUT_OF_RANGE, CODE.DATA_LOSS)
        ],
    ],
)
def test_every_status_becomes_the_error_of_who_must_act(
    code: grpc.StatusCode, details: list[Message], expected: type[Exception], words: str
) -> None:
    error = error_of(code, "the\ntext", *details)
    assert type(error) is expected
    assert words in str(error)
    assert "\n" not in str(error)


def test_every_wrong_field_is_named() -> None:
    violations = [FIELD(field="sampling.top_p", description="in (0, 1]"), FIELD(field="text", description="empty")]
    error = error_of(CODE.INVALID_ARGUMENT, "bad", error_details_pb2.BadRequest(field_violations=violations))
    assert isinstance(error, errors.InvalidRequestError)
    assert [(v.field, v.description) for v in error.violations] == [("sampling.top_p", "in (0, 1]"), ("text", "empty")]
    assert str(error) == "sampling.top_p: in (0, 1]; text: empty"


def test_a_full_queue_says_when_to_come_back() -> None:
    error = error_of(CODE.RESOURCE_EXHAUSTED, "queue full", info("OVERLOADED"), RETRY)
    assert isinstance(error, errors.OverloadedError)
    assert error.retry_after_s == 1.5


def test_an_answer_that_had_begun_says_how_far_it_got() -> None:
    for code in (CODE.UNAVAILABLE, CODE.CANCELLED):
        error = error_of(code, "gone", has_begun=True, tokens_received=7)
        assert isinstance(error, errors.UnavailableError)
        assert error.tokens_emitted == 7


@pytest.mark.parametrize("side", ["CLIENT: Sent", "CLIENT: Received", "SERVER: Received", "Sent", "Received"])
def test_a_message_over_grpcs_own_limit_is_a_wrong_request_with_that_limit(side: str) -> None:
    error = error_of(CODE.RESOURCE_EXHAUSTED, f"{side} message larger than max (17825800 vs. 16777216)")
    assert isinstance(error, errors.InvalidRequestError)
    assert "17,825,800 bytes; at most 16,777,216" in str(error)


@pytest.mark.parametrize("rich", [b"\xff\xff", failure(CODE.ABORTED, "something else", RETRY).SerializeToString()])
def test_details_that_cannot_be_read_or_contradict_the_code_are_left_out(rich: bytes) -> None:
    error = to_error(FailedCall(CODE.RESOURCE_EXHAUSTED, "full", rich), SERVER)
    assert isinstance(error, errors.OverloadedError)


@pytest.mark.parametrize(
    ("code", "text", "details", "expected"),
    [
        (CODE.UNAVAILABLE, "failed to connect to all addresses; last error: refused", [], Failure.REFUSED),
        (CODE.UNAVAILABLE, "errors resolving nobody:1: [Domain name not found]", [], Failure.REFUSED),
        (CODE.UNAVAILABLE, "DNS resolution failed for nobody:1", [], Failure.REFUSED),
        (CODE.UNAVAILABLE, "Stream removed (ping timeout)", [], Failure.LOST),
        (CODE.UNAVAILABLE, "", [], Failure.LOST),
        (CODE.CANCELLED, "by a proxy", [], Failure.LOST),
        (CODE.UNAVAILABLE, "failed to connect to a runner", [info("UNAVAILABLE")], Failure.UNAVAILABLE),
        (CODE.UNAVAILABLE, "shutting down", [info("DRAINING")], Failure.DRAINING),
        (CODE.RESOURCE_EXHAUSTED, "x", [info("SLOW_READER")], Failure.SLOW_READER),
        (CODE.RESOURCE_EXHAUSTED, "x", [info("OVERLOADED"), RETRY], Failure.OVERLOADED),
        (CODE.RESOURCE_EXHAUSTED, "Received message larger than max (2 vs. 1)", [], Failure.FINAL),
        (CODE.ALREADY_EXISTS, "x", [info("DUPLICATE_REQUEST")], Failure.DUPLICATE),
        (CODE.DEADLINE_EXCEEDED, "x", [], Failure.FINAL),
        (CODE.INTERNAL, "x", [info("INTERNAL")], Failure.FINAL),
        (CODE.INVALID_ARGUMENT, "x", [], Failure.FINAL),
    ],
)
def test_whether_another_attempt_makes_sense_is_told_apart(
    code: grpc.StatusCode, text: str, details: list[Message], expected: Failure
) -> None:
    rich = failure(code, text, *details).SerializeToString() if details else None
    assert failure_of(FailedCall(code, text, rich)) is expected
