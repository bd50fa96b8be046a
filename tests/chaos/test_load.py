"""The clients' side against a gateway that misbehaves on purpose: whatever it does to a stream is a complaint."""

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from bench.chaos.load import Load
from bench.chaos.report import Report
from bench.chaos.stock import count_streams
from bench.chaos.workload import Prompt
from bench.reference import Reference
from pagekeeper.v1 import generate_pb2, generate_pb2_grpc, types_pb2

PROMPTS = [Prompt((1, 2, 3), max_tokens=4)]
RIGHT = [(0, [5, 6]), (2, [7, 8])]
FAULTS = {
    "nothing": RIGHT,
    "a lost token": [(0, [5, 6]), (3, [8])],
    "a lost end": [(0, [5, 6])],
    "a doubled token": [(0, [5, 6]), (1, [6, 7, 8])],
    "a doubled delta": [(0, [5, 6]), (0, [5, 6]), (2, [7, 8])],
    "a wrong token": [(0, [5, 9]), (2, [7, 8])],
    "an error": [],
}


class FaultyGateway(generate_pb2_grpc.GenerateServiceServicer):
    """Answers the first request as it should, and every later one with these deltas."""

    def __init__(self, deltas: list[tuple[int, list[int]]]) -> None:
        self._deltas = RIGHT
        self._later = deltas

    async def Generate(
        self, request: generate_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[generate_pb2.GenerateResponse]:
        deltas, self._deltas = self._deltas, self._later
        if not deltas:
            await context.abort(grpc.StatusCode.INTERNAL, "planted")
        for number, (position, token_ids) in enumerate(deltas, start=1):
            response = generate_pb2.GenerateResponse(request_id=request.request_id, seed=1)
            delta = response.deltas.add(index=0, position=position, token_ids=token_ids, text=f"{token_ids}")
            if number == len(deltas):
                delta.finish_reason = types_pb2.FINISH_REASON_LENGTH
                response.usage.completion_tokens = 4
            yield response


class NoReference(Reference):
    """Every choice was clear."""

    def gap_where_they_part(self, prompt: list[int], one: list[int], other: list[int]) -> None:
        return None


@pytest.mark.parametrize("fault", FAULTS)
async def test_what_is_planted_in_streams_is_found(fault: str) -> None:
    server = grpc.aio.server()
    generate_pb2_grpc.add_GenerateServiceServicer_to_server(FaultyGateway(FAULTS[fault]), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with Load(f"127.0.0.1:{port}", PROMPTS, num_slots=1) as load:
        await load.expect()
        load.start()
        await load.drain()
    await server.stop(None)
    report = Report("planted", "0", 1, standby=False)
    count_streams(report, load.streams, load.expected, PROMPTS, NoReference(Path()))
    assert bool(report.complaints()) == (fault != "nothing"), report
