"""The client: what it sends, and what it makes of a failure."""

from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2

from pagekeeper import AdminClient, Client, Message
from pagekeeper.common import errors
from pagekeeper.v1 import admin_pb2, generate_pb2, types_pb2
from tests.unit.cli.fakes import FakeAdmin, FakeGateway, failure, serving


def delta(position: int, token_ids: list[int], text: str, finish: int = 0) -> generate_pb2.GenerateResponse:
    return generate_pb2.GenerateResponse(
        deltas=[generate_pb2.CandidateDelta(position=position, token_ids=token_ids, text=text, finish_reason=finish)]
    )


def sent(prompt: Any, **options: Any) -> generate_pb2.GenerateRequest:
    gateway = FakeGateway()
    with serving(gateway=gateway) as address, Client(address) as client:
        assert list(client.generate(prompt, **options)) == []
    return gateway.requests[0]


def test_text_is_sent_as_it_is() -> None:
    request = sent("Once upon")
    assert request.WhichOneof("input") == "text"
    assert request.text == "Once upon"
    assert request.stream


def test_an_empty_list_is_a_prompt_of_no_tokens() -> None:
    request = sent([])
    assert request.WhichOneof("input") == "token_ids"


def test_token_ids_no_vocabulary_has_still_reach_the_server() -> None:
    assert list(sent([-1, 2**31]).token_ids.token_ids) == [-1, 2**31]


def test_messages_make_a_chat() -> None:
    request = sent([Message("system", "Be brief."), Message("user", "Hello")])
    assert [(m.role, m.content) for m in request.chat.messages] == [("system", "Be brief."), ("user", "Hello")]


def test_only_what_was_set_is_sent() -> None:
    request = sent("x", temperature=0, top_p=None, stop=["\n"], n=2)
    assert [field.name for field, _ in request.sampling.ListFields()] == ["temperature", "stop", "n"]


def test_a_value_that_does_not_fit_its_field_is_named_before_anything_is_sent() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(errors.InvalidRequestError, match=r"sampling\.seed"):
        client.generate("x", seed=-1)


def test_the_answer_has_deltas_then_seed_and_usage() -> None:
    first, last = delta(0, [5, 6], "Par"), delta(2, [7], "is", types_pb2.FINISH_REASON_STOP)
    first.seed = 2**63
    last.usage.prompt_tokens = 9
    with serving(gateway=FakeGateway(first, last)) as address, Client(address) as client:
        answer = client.generate("x")
        deltas = list(answer)
    assert [(d.position, d.token_ids, d.text, d.finish_reason) for d in deltas] == [
        (0, [5, 6], "Par", None),
        (2, [7], "is", "stop"),
    ]
    assert answer.seed == 2**63
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 9


VIOLATION = error_details_pb2.BadRequest(
    field_violations=[error_details_pb2.BadRequest.FieldViolation(field="sampling.top_p", description="in (0, 1]")]
)
RETRY = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=1, nanos=500_000_000))
DRAINING = error_details_pb2.ErrorInfo(reason="DRAINING")
SLOW = error_details_pb2.ErrorInfo(reason="SLOW_READER")
CODE = grpc.StatusCode


@pytest.mark.parametrize(
    ("status", "expected", "words"),
    [
        (failure(CODE.INVALID_ARGUMENT, "bad", VIOLATION), errors.InvalidRequestError, r"sampling.top_p: in \(0, 1\]"),
        (failure(CODE.INVALID_ARGUMENT, "bad"), errors.InvalidRequestError, "request: bad"),
        (failure(CODE.NOT_FOUND, "no model m"), errors.UnknownModelError, "no model m"),
        (failure(CODE.ALREADY_EXISTS, "in use"), errors.DuplicateRequestError, "in use"),
        (failure(CODE.RESOURCE_EXHAUSTED, "queue full", RETRY), errors.OverloadedError, "queue full"),
        (failure(CODE.RESOURCE_EXHAUSTED, "read faster", SLOW), errors.SlowReaderError, "read faster"),
        (failure(CODE.UNAVAILABLE, "draining", DRAINING), errors.UnavailableError, "draining"),
        (failure(CODE.DEADLINE_EXCEEDED, "late"), errors.DeadlineError, "allow more time"),
        (failure(CODE.INTERNAL, "error id 7"), errors.BugError, "INTERNAL: error id 7"),
    ],
)
def test_a_status_becomes_the_error_of_who_must_act(
    status: status_pb2.Status, expected: type[Exception], words: str
) -> None:
    with (
        serving(gateway=FakeGateway(failure=status)) as address,
        Client(address) as client,
        pytest.raises(expected, match=words) as caught,
    ):
        list(client.generate("x"))
    if isinstance(caught.value, errors.OverloadedError):
        assert caught.value.retry_after_s == 1.5


def test_a_connection_lost_in_the_middle_says_how_far_the_answer_got() -> None:
    gateway = FakeGateway(delta(0, [1, 2, 3], "abc"), failure=failure(CODE.UNAVAILABLE, "gone"))
    with (
        serving(gateway=gateway) as address,
        Client(address) as client,
        pytest.raises(errors.UnavailableError) as caught,
    ):
        list(client.generate("x"))
    assert caught.value.tokens_emitted == 3


def test_nobody_at_the_address_is_an_error_of_its_own() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(errors.CannotConnectError, match=r"127\.0\.0\.1:1"):
        list(client.generate("x"))


def test_stats_hold_every_field_with_whole_numbers() -> None:
    stats = admin_pb2.GetStatsResponse(sessions=[admin_pb2.SessionStats(epoch=2**40)])
    stats.pool.block_bytes = 2**33
    admin = FakeAdmin(stats, admin_pb2.AuditResponse(violations=["block 3 is in two states"]))
    with serving(admin=admin) as address, AdminClient(address) as client:
        numbers = client.stats()
        assert client.audit() == ["block 3 is in two states"]
    assert numbers["pool"]["block_bytes"] == 2**33
    assert numbers["pool"]["free_blocks"] == 0
    assert numbers["sessions"][0]["epoch"] == 2**40
