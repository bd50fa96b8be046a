"""When, where and whether a call is made again; nothing here waits or calls anybody."""

import grpc
import pytest
from google.protobuf import duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2

from pagekeeper import (
    CannotConnectError,
    DeadlineError,
    DuplicateRequestError,
    InvalidRequestError,
    OverloadedError,
    PagekeeperError,
    UnavailableError,
)
from pagekeeper.client.attempts import Attempts, Route
from tests.unit.cli.fakes import failure
from tests.unit.client.failed_call import FailedCall

CODE = grpc.StatusCode


def failed(code: grpc.StatusCode, text: str, *details: Message) -> FailedCall:
    return FailedCall(code, text, failure(code, text, *details).SerializeToString() if details else None)


def info(reason: str) -> error_details_pb2.ErrorInfo:
    return error_details_pb2.ErrorInfo(reason=reason)


def overloaded(retry_after_s: int) -> FailedCall:
    retry = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=retry_after_s))
    return failed(CODE.RESOURCE_EXHAUSTED, "the queue is full", info("OVERLOADED"), retry)


REFUSED = failed(CODE.UNAVAILABLE, "failed to connect to all addresses; last error: Connection refused")
LOST = failed(CODE.UNAVAILABLE, "Stream removed (Socket closed)")
UNAVAILABLE = failed(CODE.UNAVAILABLE, "no runner was ready", info("UNAVAILABLE"))
DRAINING = failed(CODE.UNAVAILABLE, "the server is shutting down", info("DRAINING"))
DUPLICATE = failed(CODE.ALREADY_EXISTS, "taken over", info("DUPLICATE_REQUEST"))
SLOW_READER = failed(CODE.RESOURCE_EXHAUSTED, "too slow", info("SLOW_READER"))


class Call:
    """One call on a clock that stands still; the pause is always the longest that it can be."""

    def __init__(self, server: str = "a", timeout_s: float | None = None, resume_for_s: float = 60.0) -> None:
        self.now = 1000.0
        self.retries: list[PagekeeperError] = []
        self.route = Route(server, self.retries.append, clock=lambda: self.now, rng=lambda: 1.0)
        self.attempts = Attempts(self.route, timeout_s, resume_for_s)

    def fails(self, error: grpc.RpcError = LOST, after_s: float = 0.0) -> float:
        """The attempt fails, and its pause passes."""
        self.attempts.next()
        self.now += after_s
        pause_s = self.attempts.pause_s(error, 7)
        self.now += pause_s
        return pause_s

    def fails_again_and_again(self, error: grpc.RpcError) -> None:
        while True:
            self.fails(error)

    def goes_to(self) -> str:
        return self.attempts.next()[0]


def test_pauses_double_up_to_a_limit_and_begin_again_with_progress() -> None:
    call = Call()
    pauses = [call.fails() for _ in range(7)]
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    call.attempts.make_progress()
    assert call.fails() == 0.05


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
@pytest.mark.parametrize(("failures", "limit_s"), [(1, 0.05), (3, 0.2), (1500, 1.0)])
def test_a_pause_is_anything_from_nothing_to_the_limit(share: float, failures: int, limit_s: float) -> None:
    attempts = Attempts(Route("a", clock=lambda: 0.0, rng=lambda: share), None, 60.0)
    assert [attempts.pause_s(LOST) for _ in range(failures)][-1] == share * limit_s


def test_a_lost_connection_is_tried_until_the_time_since_its_loss_is_up() -> None:
    call = Call(resume_for_s=3.0)
    call.attempts.make_progress()
    call.now += 1000  # a long silence is no loss
    lost_at = call.now
    call.fails(LOST)
    with pytest.raises(UnavailableError, match="broke after 7 tokens") as caught:
        call.fails_again_and_again(REFUSED)
    assert caught.value.tokens_emitted == 7
    # The last attempt was made when the time was up.
    assert call.now == pytest.approx(lost_at + 3.0)
    assert all(isinstance(error, UnavailableError) for error in call.retries)


def test_each_message_gives_the_whole_time_again() -> None:
    call = Call(resume_for_s=1.0)
    for _ in range(5):
        call.attempts.make_progress()
        call.fails()
        call.fails(after_s=0.9)
    with pytest.raises(CannotConnectError):
        Call(resume_for_s=0).fails()


def test_a_wait_for_a_runner_at_the_server_counts() -> None:
    call = Call(resume_for_s=60.0)
    with pytest.raises(UnavailableError, match="no runner"):
        call.fails(UNAVAILABLE, after_s=60.0)
    call = Call(resume_for_s=60.0)
    call.fails(UNAVAILABLE, after_s=59.0)
    with pytest.raises(UnavailableError, match="no runner"):
        call.fails(UNAVAILABLE, after_s=1.0)


def test_a_server_that_drains_after_a_long_silence_is_left_at_once() -> None:
    call = Call("a,b", resume_for_s=60.0)
    call.attempts.make_progress()
    assert (call.fails(DRAINING, after_s=1000.0), call.goes_to()) == (0.0, "b")
    call = Call(resume_for_s=60.0)
    assert call.fails(DRAINING, after_s=1000.0) == 0.05
    drained_at = call.now - 0.05
    with pytest.raises(CannotConnectError):
        call.fails_again_and_again(REFUSED)
    assert call.now == pytest.approx(drained_at + 60.0)


def test_a_server_that_drains_is_left_for_no_other_if_nothing_is_to_be_resumed() -> None:
    with pytest.raises(UnavailableError, match="shutting down"):
        Call("a,b", resume_for_s=0).fails(DRAINING)


def test_each_lost_call_may_come_late_and_take_the_place_of_its_successor_once() -> None:
    call = Call("a,b")
    for _ in range(2):
        call.fails(LOST)
    assert [call.fails(DUPLICATE), call.goes_to(), call.fails(DUPLICATE)] == [0.05, "a", 0.1]
    assert [type(error) for error in call.retries[2:]] == [UnavailableError] * 2
    assert call.attempts.may_be_live
    with pytest.raises(DuplicateRequestError):
        call.fails(DUPLICATE)


def test_a_late_call_is_not_waited_out_for_longer_than_a_lost_connection() -> None:
    call = Call(resume_for_s=3.0)
    call.attempts.make_progress()
    call.fails(LOST)
    with pytest.raises(UnavailableError, match="taken over") as caught:
        call.fails(DUPLICATE, after_s=3.0)
    assert caught.value.tokens_emitted == 7


@pytest.mark.parametrize("earlier", [REFUSED, UNAVAILABLE, DRAINING, SLOW_READER])
def test_a_call_whose_end_was_told_does_not_come_late(earlier: FailedCall) -> None:
    call = Call()
    call.attempts.make_progress()
    call.fails(earlier)
    with pytest.raises(DuplicateRequestError):
        call.fails(DUPLICATE)


def test_a_server_that_was_never_reached_is_not_waited_for() -> None:
    call = Call("a,b,c")
    assert [call.fails(REFUSED), call.fails(REFUSED)] == [0.0, 0.0]
    with pytest.raises(CannotConnectError, match="cannot connect to a,b,c"):
        call.fails(REFUSED)


def test_a_server_that_another_call_has_reached_is_waited_for() -> None:
    call = Call()
    Attempts(call.route, None, 60.0).make_progress()
    assert call.fails(REFUSED) > 0


def test_addresses_are_tried_in_turn_and_only_then_there_is_a_pause() -> None:
    call = Call(" a, b ,a,c,")
    assert call.route.addresses == ("a", "b", "c")
    call.attempts.make_progress()
    seen = [(call.goes_to(), call.fails(error)) for error in (LOST, REFUSED, DRAINING, REFUSED, REFUSED, REFUSED)]
    assert seen == [("a", 0.0), ("b", 0.0), ("c", 0.05), ("a", 0.0), ("b", 0.0), ("c", 0.1)]


def test_all_calls_leave_a_failed_address_together_and_only_once() -> None:
    call = Call("a,b")
    other = Attempts(call.route, None, 60.0)
    assert (call.goes_to(), other.next()[0]) == ("a", "a")
    call.fails()
    other.pause_s(LOST)
    assert (call.goes_to(), other.next()[0]) == ("b", "b")
    assert Attempts(call.route, None, 60.0).next()[0] == "b"


def test_a_refused_call_goes_to_the_next_address_even_if_nothing_is_resumed() -> None:
    call = Call("a,b", resume_for_s=0)
    assert call.fails(REFUSED) == 0.0
    with pytest.raises(CannotConnectError):
        call.fails(LOST)


def test_an_attempt_and_its_pause_get_what_is_left_of_the_whole_time() -> None:
    call = Call(timeout_s=2.0)
    assert call.attempts.next() == ("a", 2.0)
    call.attempts.make_progress()
    call.now += 1.97
    assert call.fails() == pytest.approx(0.03)
    assert call.attempts.next() == ("a", 0.0)
    with pytest.raises(DeadlineError):
        call.fails(failed(CODE.DEADLINE_EXCEEDED, "Deadline Exceeded"))


def test_an_overload_is_waited_for_only_by_an_answer_that_has_begun() -> None:
    call = Call("a,b")
    with pytest.raises(OverloadedError):
        call.fails(overloaded(5))
    call.attempts.make_progress()
    assert (call.fails(overloaded(5)), call.goes_to()) == (5.0, "a")
    call = Call(resume_for_s=4.0)
    call.attempts.make_progress()
    with pytest.raises(OverloadedError):
        call.fails(overloaded(5))


def test_a_slow_reader_goes_on_where_it_was() -> None:
    call = Call("a,b")
    call.attempts.make_progress()
    assert (call.fails(SLOW_READER), call.goes_to()) == (0.05, "a")


@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (failed(CODE.INVALID_ARGUMENT, "x"), InvalidRequestError),
        (DUPLICATE, DuplicateRequestError),
        (failed(CODE.DEADLINE_EXCEEDED, "x", info("DEADLINE")), DeadlineError),
        (failed(CODE.RESOURCE_EXHAUSTED, "full"), OverloadedError),
        (failed(CODE.UNIMPLEMENTED, "x"), CannotConnectError),
        (failed(CODE.INTERNAL, "x", info("INTERNAL")), PagekeeperError),
        (failed(CODE.UNAUTHENTICATED, "x"), PagekeeperError),
    ],
)
def test_what_would_fail_again_is_not_tried_again(
    error: FailedCall, expected: type[PagekeeperError], has_begun: bool
) -> None:
    call = Call("a,b")
    if has_begun:
        call.attempts.make_progress()
    with pytest.raises(expected):
        call.fails(error)
    assert call.retries == []
    assert call.goes_to() == "a"


@pytest.mark.parametrize(
    ("error", "may_be_live"),
    [(LOST, True), (failed(CODE.CANCELLED, "by a proxy"), True), (UNAVAILABLE, False), (DRAINING, False)],
)
def test_only_a_server_that_was_lost_may_still_be_at_work(error: FailedCall, may_be_live: bool) -> None:
    call = Call()
    call.fails(error)
    assert call.attempts.may_be_live is may_be_live
    assert not call.attempts.has_begun
