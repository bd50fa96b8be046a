"""Both clients against a gateway that says what a test tells it to."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from pagekeeper import AdminClient, CannotConnectError, Client, InvalidRequestError, UnavailableError
from pagekeeper.v1 import admin_pb2, generate_pb2, types_pb2
from tests.unit.cli.fakes import WRONG_TOP_P, FakeAdmin, FakeGateway, failure, serving
from tests.unit.client.adapters import ADAPTERS, Adapter

UNAVAILABLE = failure(
    grpc.StatusCode.UNAVAILABLE, "the server is shutting down", error_details_pb2.ErrorInfo(reason="UNAVAILABLE")
)

Connect = Callable[..., Adapter]


@pytest.fixture(params=list(ADAPTERS))
def connect(request: pytest.FixtureRequest) -> Connect:
    return ADAPTERS[request.param]


class RecoveringGateway(FakeGateway):
    """Ends the first `failures` requests with `first`, then answers."""

    def __init__(
        self, *responses: generate_pb2.GenerateResponse, failures: int, first: status_pb2.Status = UNAVAILABLE
    ) -> None:
        super().__init__(*responses)
        self._failures = failures
        self._first = first

    def Generate(
        self, request: generate_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[generate_pb2.GenerateResponse]:
        self.requests.append(request)
        if len(self.requests) <= self._failures:
            context.abort_with_status(rpc_status.to_status(self._first))
        yield from self.responses


class EndingGateway(FakeGateway):
    """Ends its server with the first request, and that with UNAVAILABLE."""

    def __init__(self, end: Callable[[], None]) -> None:
        super().__init__(failure=UNAVAILABLE)
        self._end = end

    def Generate(
        self, request: generate_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[generate_pb2.GenerateResponse]:
        threading.Thread(target=self._end).start()
        return super().Generate(request, context)


def delta(position: int, token_ids: list[int], text: str, finish: int = 0) -> generate_pb2.GenerateResponse:
    part = generate_pb2.CandidateDelta(position=position, token_ids=token_ids, text=text, finish_reason=finish)
    return generate_pb2.GenerateResponse(deltas=[part], request_id="id")


WHOLE = (delta(0, [5, 6], "Par"), delta(2, [7], "is", types_pb2.FINISH_REASON_STOP))


async def test_an_answer_is_its_deltas_and_their_join(connect: Connect) -> None:
    with serving(gateway=FakeGateway(*WHOLE)) as address:
        client = connect(address)
        answer = client.generate("x")
        first = await client.next(answer)
        assert first is not None
        assert (first.index, first.position, first.token_ids, first.text) == (0, 0, [5, 6], "Par")
        assert await client.text(answer) == "Paris"
        assert await client.next(answer) is None
        assert (await client.collect(client.generate("x")))[0].token_ids == [5, 6, 7]
        await client.close()


async def test_what_is_asked_for_reaches_the_server(connect: Connect) -> None:
    gateway = FakeGateway()
    with serving(gateway=gateway) as address:
        client = connect(address)
        options = {"model": "m", "request_id": "r", "stream": False, "priority": -2, "temperature": 0.5}
        assert await client.collect(client.generate("x", **options)) == []
        (request,) = gateway.requests
        assert (request.model, request.request_id, request.stream, request.priority) == ("m", "r", False, -2)
        assert request.sampling.temperature == 0.5
        with pytest.raises(InvalidRequestError, match=r"sampling\.seed"):
            client.generate("x", seed=-1)
        assert len(gateway.requests) == 1
        await client.close()


async def test_unavailable_before_the_first_message_is_tried_again_and_is_the_same_request(connect: Connect) -> None:
    gateway = RecoveringGateway(*WHOLE, failures=3)
    with serving(gateway=gateway) as address:
        client = connect(address)
        answer = client.generate("x")
        assert await client.text(answer) == "Paris"
        assert [request.request_id for request in gateway.requests] == [answer.request_id] * 4
        assert answer.request_id
        # A server that says no is not at work on it.
        assert not any(request.HasField("resume") for request in gateway.requests)
        await client.close()


async def test_who_wants_no_further_attempt_gets_none(connect: Connect) -> None:
    gateway = RecoveringGateway(*WHOLE, failures=1)
    with serving(gateway=gateway) as address:
        client = connect(address, resume_for_s=0)
        with pytest.raises(UnavailableError, match="shutting down"):
            await client.collect(client.generate("x"))
        assert len(gateway.requests) == 1
        await client.close()


async def test_a_server_that_ends_before_the_first_message_and_does_not_come_back_cannot_be_connected_to(
    connect: Connect,
) -> None:
    with ExitStack() as server:
        gateway = EndingGateway(server.close)
        retries: list[Exception] = []
        client = connect(server.enter_context(serving(gateway=gateway)), resume_for_s=0.3, on_retry=retries.append)
        with pytest.raises(CannotConnectError):
            await client.collect(client.generate("x"))
        assert len(retries) > 1
        await client.close()


async def test_what_will_not_get_better_is_not_tried_again(connect: Connect) -> None:
    gateway = RecoveringGateway(*WHOLE, failures=1, first=WRONG_TOP_P)
    with serving(gateway=gateway) as address:
        client = connect(address)
        with pytest.raises(InvalidRequestError, match=r"sampling\.top_p: must be"):
            await client.collect(client.generate("x"))
        assert len(gateway.requests) == 1
        await client.close()


async def test_a_stream_that_breaks_after_its_first_message_says_how_far_it_got_again_and_again(
    connect: Connect,
) -> None:
    gateway = FakeGateway(delta(0, [1, 2, 3], "abc"), failure=failure(grpc.StatusCode.UNAVAILABLE, "gone"))
    with serving(gateway=gateway) as address:
        client = connect(address, resume_for_s=0)
        answer = client.generate("x")
        for _ in range(2):
            with pytest.raises(UnavailableError) as caught:
                await client.collect(answer)
            assert caught.value.tokens_emitted == 3
            del caught  # and with it the loop in its traceback
        assert answer.candidates[0].text == "abc"
        assert len(gateway.requests) == 1
        await client.close()


async def test_nobody_at_the_address_is_an_error_of_its_own(connect: Connect) -> None:
    client = connect("127.0.0.1:1")
    with pytest.raises(CannotConnectError, match=r"127\.0\.0\.1:1"):
        await client.collect(client.generate("x"))
    for method in ("list_models", "health"):
        with pytest.raises(CannotConnectError, match=r"127\.0\.0\.1:1"):
            await client.ask(method)
    await client.close()


async def test_a_server_without_the_method_is_not_the_one_that_was_meant(connect: Connect) -> None:
    with serving(admin=FakeAdmin(admin_pb2.GetStatsResponse(), admin_pb2.AuditResponse())) as address:
        client = connect(address)
        with pytest.raises(CannotConnectError, match="does not offer this"):
            await client.collect(client.generate("x"))
        await client.close()


async def test_a_closed_client_may_be_closed_again_and_one_that_never_connected_too(connect: Connect) -> None:
    for _ in range(2):
        client = connect("127.0.0.1:1")
        await client.close()
        await client.close()


def clients_threads() -> set[threading.Thread]:
    """All that live but those on which the fake server answers."""
    return {thread for thread in threading.enumerate() if not thread.name.startswith("ThreadPoolExecutor")}


def test_no_thread_is_left_when_a_client_is_closed() -> None:
    with serving(gateway=FakeGateway(*WHOLE)) as address:
        before = clients_threads()
        with Client(address) as client:
            answers = [client.generate("x") for _ in range(4)]
            next(answers[0])
        for thread in clients_threads() - before:
            thread.join(10)
            assert not thread.is_alive(), thread


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
