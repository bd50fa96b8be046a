"""How the clients' gRPC channels behave."""

from pagekeeper.common.sockets import CHANNEL_OPTIONS

# The most that a server takes (SERVER_OPTIONS). A machine that is gone, or a process that is stopped, does not say so:
# without pings a stream from it would wait for ever.
_PING_INTERVAL_MS = 10_000
_PING_TIMEOUT_MS = 5_000

OPTIONS: list[tuple[str, int | str]] = [
    *CHANNEL_OPTIONS,
    # Failed calls are tried again by us (attempts.py), who know what has been received.
    ("grpc.enable_retries", 0),
    ("grpc.keepalive_time_ms", _PING_INTERVAL_MS),
    # It is this that counts, not grpc.keepalive_timeout_ms (measured with grpcio 1.85: with the latter alone a stopped
    # server is left after 70 s, with this after 15 s).
    ("grpc.http2.ping_timeout_ms", _PING_TIMEOUT_MS),
    # By default the third ping in a row without data is put off by a minute, and so is the end of a silent stream
    # whose server has stopped.
    ("grpc.http2.max_pings_without_data", 0),
    # How long a connection may take, in spite of its name; a stopped process is connected to, but does not answer.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # A channel refuses calls until it has tried to connect again; by default that comes to take two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 250),
]
