"""A failed call, without a call."""

import grpc

_DETAILS_KEY = "grpc-status-details-bin"


class FailedCall(grpc.RpcError):
    """What a stub raises."""

    def __init__(self, code: grpc.StatusCode, text: str, rich: bytes | None = None) -> None:
        self.code = lambda: code
        self.details = lambda: text
        self.trailing_metadata = lambda: () if rich is None else ((_DETAILS_KEY, rich),)
