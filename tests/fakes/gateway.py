"""A gateway in this event loop, on a real port, and a client that collects its answers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.config import GatewaySettings
from gateway.server import Gateway
from pagekeeper.v1 import generate_pb2, generate_pb2_grpc, types_pb2
from pagekeeper.v1.generate_pb2 import Beam, CandidateDelta, GenerateRequest, GenerateResponse

_POLL_S = 0.01
_PATIENCE_S = 20.0


async def until(condition: Callable[[], Any]) -> None:
    """Wait for a condition, with a deadline that only a failure meets."""
    async with asyncio.timeout(_PATIENCE_S):
        while not condition():
            await asyncio.sleep(_POLL_S)


def prompt_request(token_ids: Iterable[int] = (5, 6, 7), **sampling: Any) -> GenerateRequest:
    """A request for tokens after `token_ids`; `sampling` holds fields of SamplingParams."""
    return GenerateRequest(
        token_ids=generate_pb2.TokenIds(token_ids=token_ids), sampling=types_pb2.SamplingParams(**sampling)
    )


def resuming(request: GenerateRequest, seed: int, *token_ids: Sequence[int]) -> GenerateRequest:
    """The same request behind these tokens of its candidates."""
    resumed = GenerateRequest()
    resumed.CopyFrom(request)
    resumed.resume.seed = seed
    for index, each in enumerate(token_ids):
        resumed.resume.candidates.add(index=index, token_ids=each)
    return resumed


@dataclass
class Candidate:
    """What a client joins of one candidate; checks that positions are contiguous and that nothing follows the end."""

    first_position: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[types_pb2.TokenLogprobs] = field(default_factory=list)
    last: CandidateDelta = field(default_factory=CandidateDelta)

    @property
    def finish_reason(self) -> int:
        return self.last.finish_reason

    def take(self, delta: CandidateDelta) -> None:
        assert delta.position == self.first_position + len(self.token_ids)
        assert self.finish_reason == types_pb2.FINISH_REASON_UNSPECIFIED, "a delta after the last"
        self.token_ids += delta.token_ids
        self.text += delta.text
        self.logprobs += delta.logprobs
        assert len(self.logprobs) in (0, len(self.token_ids))
        self.last = delta


@dataclass
class Answer:
    """What a client joins from the messages of a stream; the properties are those of the first candidate."""

    num_messages: int = 0
    candidates: dict[int, Candidate] = field(default_factory=dict)
    seed: int | None = None
    usage: types_pb2.Usage | None = None
    request_id: str = ""
    first: GenerateResponse = field(default_factory=GenerateResponse)
    beams: list[list[Beam]] = field(default_factory=list)

    @property
    def first_position(self) -> int:
        return self._candidate.first_position

    @property
    def token_ids(self) -> list[int]:
        return self._candidate.token_ids

    @property
    def text(self) -> str:
        return self._candidate.text

    @property
    def finish_reason(self) -> int:
        return self._candidate.finish_reason

    @property
    def _candidate(self) -> Candidate:
        return self.candidates.get(0, Candidate(0))

    def all_token_ids(self) -> list[list[int]]:
        """Of every candidate, in order."""
        return [self.candidates[index].token_ids for index in sorted(self.candidates)]

    def take(self, response: GenerateResponse) -> None:
        is_first = self.num_messages == 0
        assert self.usage is None, "a message after the last"
        assert response.HasField("seed") == is_first
        assert is_first or not (response.HasField("prompt") or response.HasField("branch_text"))
        assert len({delta.index for delta in response.deltas}) == len(response.deltas)
        for delta in response.deltas:
            self.candidates.setdefault(delta.index, Candidate(delta.position)).take(delta)
        if response.beams:
            self.beams.append(list(response.beams))
        self.num_messages += 1
        self.request_id = response.request_id
        if is_first:
            self.seed, self.first = response.seed, response
        if response.HasField("usage"):
            assert all(candidate.finish_reason for candidate in self.candidates.values())
            self.usage = response.usage


async def failure(call: Any) -> tuple[grpc.StatusCode, status_pb2.Status]:
    """The code and the rich status that a call ends with; reads the call to its end."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code(), status_of(error)
    raise AssertionError("the call succeeded")


def status_of(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    """The rich status of a failed call; empty when it has none."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            return status_pb2.Status.FromString(value)
    return status_pb2.Status()


def wrong_fields(status: status_pb2.Status) -> list[str]:
    """The fields that a BadRequest names."""
    detail = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(detail)
    return [violation.field for violation in detail.field_violations]


def error_info(status: status_pb2.Status) -> error_details_pb2.ErrorInfo:
    """The ErrorInfo of a status."""
    detail = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(detail)
    return detail


@dataclass
class GatewayClient:
    """A client of a gateway in this event loop."""

    gateway: Gateway
    channel: grpc.aio.Channel
    stop: asyncio.Event
    serving: "asyncio.Task[None]"

    def __post_init__(self) -> None:
        self.stub = generate_pb2_grpc.GenerateServiceStub(self.channel)

    async def generate(self, request: GenerateRequest, read_s: float = 0.0) -> Answer:
        """The whole answer, read with a pause after each message."""
        answer = Answer()
        async for response in self.stub.Generate(request):
            answer.take(response)
            if read_s:
                await asyncio.sleep(read_s)
        return answer

    async def is_serving(self, service: str = "") -> bool:
        """What the health service says."""
        response = await health_pb2_grpc.HealthStub(self.channel).Check(health_pb2.HealthCheckRequest(service=service))
        return response.status == health_pb2.HealthCheckResponse.SERVING

    async def until_serving(self, serving: bool = True, service: str = "") -> None:
        """Wait for the health service to say so."""
        async with asyncio.timeout(_PATIENCE_S):
            while await self.is_serving(service) is not serving:
                await asyncio.sleep(_POLL_S)

    async def until_runners(self, count: int) -> None:
        """Wait until so many runners have been ready and are not lost."""
        await until(lambda: len(self.gateway._runners._router._fleet._runners) == count)

    def admission(self) -> tuple[int, int]:
        """Requests with a permit, and requests in the queue."""
        return self.gateway._service._admission.running, self.gateway._service._admission.waiting


async def generate_some(client: GatewayClient, count: int, max_tokens: int) -> list[Answer]:
    """So many answers at once, of the prompts [5, 6, 7, index] with the seeds index."""
    requests = [prompt_request([5, 6, 7, index], seed=index, max_tokens=max_tokens) for index in range(count)]
    return list(await asyncio.gather(*(client.generate(request) for request in requests)))


@contextlib.asynccontextmanager
async def running_gateway(runtime_dir: Path, model: Path, **settings: Any) -> AsyncIterator[GatewayClient]:
    """A gateway that serves until the block ends."""
    fields = {"listen": "127.0.0.1:0", "grace_s": 0.0} | settings
    gateway = Gateway(GatewaySettings(runtime_dir=runtime_dir, model=model, **fields))
    stop = asyncio.Event()
    serving = asyncio.create_task(gateway.serve(stop))
    started = asyncio.create_task(gateway.started.wait())
    await asyncio.wait([serving, started], return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        started.cancel()
        await serving
    try:
        async with grpc.aio.insecure_channel(gateway.address) as channel:
            yield GatewayClient(gateway, channel, stop, serving)
    finally:
        stop.set()
        await serving
