"""What the synchronous clients have in common: channels, and calls with one answer."""

import threading
from collections.abc import Callable
from typing import Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagekeeper.client.attempts import Attempts, Route
from pagekeeper.client.channel import OPTIONS
from pagekeeper.client.responses import CLOSED, is_serving
from pagekeeper.common.errors import PagekeeperError, UnavailableError

Response = TypeVar("Response")

HEALTH_TIMEOUT_S = 10.0


class Channels:
    """One to each address of a route, opened when it is first used. Any thread may use them."""

    def __init__(self) -> None:
        self._open: dict[str, grpc.Channel] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed.is_set()

    def to(self, address: str) -> grpc.Channel:
        """The channel to an address.

        Raises:
            UnavailableError: they are closed.
        """
        with self._lock:
            if self._closed.is_set():
                raise UnavailableError(CLOSED)
            if address not in self._open:
                self._open[address] = grpc.insecure_channel(
                    address, options=OPTIONS, compression=grpc.Compression.NoCompression
                )
            return self._open[address]

    def close(self) -> None:
        """Close all; what still runs on them is ended, and who pauses goes on."""
        self._closed.set()
        with self._lock:
            for channel in self._open.values():
                channel.close()

    def pause(self, seconds: float) -> None:
        """Wait, until they are closed at the most."""
        self._closed.wait(seconds)


class Connection:
    """Connects when it is first used and closes with its `with` block.

    Args:
        server: HOST:PORT or unix:PATH; several, with commas between them, are tried in turn.
        on_retry: called with what has failed before each further attempt of a call.
    """

    def __init__(self, server: str, on_retry: Callable[[PagekeeperError], None] | None = None) -> None:
        self._route = Route(server, on_retry)
        self._channels = Channels()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; what still runs on it is ended."""
        self._channels.close()

    def health(self, service: str = "", *, timeout_s: float | None = HEALTH_TIMEOUT_S) -> bool:
        """Whether the server says that it can serve, at the first address where there is one.

        Args:
            service: one service of it, such as "pagekeeper.v1.RunnerService": whether no runner is missing.
            timeout_s: how long to wait, in seconds.

        Raises:
            TryAgainError: it cannot be asked.
        """

        def check(channel: grpc.Channel, left_s: float | None) -> health_pb2.HealthCheckResponse:
            stub = health_pb2_grpc.HealthStub(channel)
            # types-grpcio-health-checking leaves the stub's methods out
            return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=left_s)  # type: ignore[attr-defined,no-any-return]

        return is_serving(self._ask(check, Attempts(self._route, timeout_s, resume_for_s=0.0)))

    def _ask(self, call: Callable[[grpc.Channel, float | None], Response], attempts: Attempts) -> Response:
        """What a call brings, if need be at another attempt; it gets a channel and its timeout in seconds.

        Raises:
            PagekeeperError: it failed.
        """
        while True:
            address, left_s = attempts.next()
            try:
                response = call(self._channels.to(address), left_s)
            except grpc.RpcError as error:
                self._channels.pause(attempts.pause_s(error))
            else:
                attempts.make_progress()
                return response
