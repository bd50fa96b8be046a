"""How the clients' gRPC channels behave."""

import json

from pagekeeper.common.sockets import CHANNEL_OPTIONS
from pagekeeper.v1 import generate_pb2

_GENERATE = generate_pb2.DESCRIPTOR.services_by_name["GenerateService"].full_name

# gRPC itself never retries a call whose first message has come, so no token can come twice. One retry only: a gateway
# without a runner has waited for one (`runner_wait_s`) before it says UNAVAILABLE.
_SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [{"service": _GENERATE}],
            "retryPolicy": {
                "maxAttempts": 2,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}

OPTIONS: list[tuple[str, int | str]] = [
    *CHANNEL_OPTIONS,
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    # A machine that is gone does not say so: without pings a stream from it would wait for ever.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]
