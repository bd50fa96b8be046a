"""A gateway and an admin port that say what a test tells them to."""

import contextlib
from collections.abc import Iterator
from concurrent import futures

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from pagekeeper.v1 import admin_pb2, admin_pb2_grpc, generate_pb2, generate_pb2_grpc


class FakeGateway(generate_pb2_grpc.GenerateServiceServicer):
    """Answers every request with `responses`, then with `failure` if there is one."""

    def __init__(self, *responses: generate_pb2.GenerateResponse, failure: status_pb2.Status | None = None) -> None:
        self.responses = responses
        self.failure = failure
        self.requests: list[generate_pb2.GenerateRequest] = []

    def Generate(
        self, request: generate_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[generate_pb2.GenerateResponse]:
        self.requests.append(request)
        yield from self.responses
        if self.failure is not None:
            context.abort_with_status(rpc_status.to_status(self.failure))


class FakeAdmin(admin_pb2_grpc.AdminServiceServicer):
    """Answers with the numbers it was given."""

    def __init__(self, stats: admin_pb2.GetStatsResponse, audit: admin_pb2.AuditResponse) -> None:
        self.stats = stats
        self.audit = audit

    def GetStats(self, request: admin_pb2.GetStatsRequest, context: grpc.ServicerContext) -> admin_pb2.GetStatsResponse:
        return self.stats

    def WatchStats(
        self, request: admin_pb2.WatchStatsRequest, context: grpc.ServicerContext
    ) -> Iterator[admin_pb2.WatchStatsResponse]:
        for _ in range(2):
            yield admin_pb2.WatchStatsResponse(stats=self.stats)
        context.abort(grpc.StatusCode.UNAVAILABLE, "the cache manager is gone")

    def Audit(self, request: admin_pb2.AuditRequest, context: grpc.ServicerContext) -> admin_pb2.AuditResponse:
        return self.audit


def failure(code: grpc.StatusCode, message: str, *details: Message) -> status_pb2.Status:
    """A status with google.rpc details."""
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    return status_pb2.Status(code=code.value[0], message=message, details=packed)


@contextlib.contextmanager
def serving(*, gateway: FakeGateway | None = None, admin: FakeAdmin | None = None) -> Iterator[str]:
    """Serve the fakes on a free port; yields its address."""
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    if gateway is not None:
        generate_pb2_grpc.add_GenerateServiceServicer_to_server(gateway, server)
    if admin is not None:
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


WRONG_TOP_P = failure(
    grpc.StatusCode.INVALID_ARGUMENT,
    "invalid request",
    error_details_pb2.BadRequest(
        field_violations=[
            error_details_pb2.BadRequest.FieldViolation(field="sampling.top_p", description="must be in (0, 1]")
        ]
    ),
)
