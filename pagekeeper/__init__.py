"""Pagekeeper: an LLM server over gRPC whose KV cache outlives the engine."""

from typing import TYPE_CHECKING, Any

from pagekeeper.common.errors import (
    BugError,
    CannotConnectError,
    DeadlineError,
    DuplicateRequestError,
    InvalidRequestError,
    OverloadedError,
    PagekeeperError,
    RequestError,
    SlowReaderError,
    TryAgainError,
    UnavailableError,
    UnknownModelError,
)

if TYPE_CHECKING:
    from pagekeeper.client import (
        AdminClient,
        Answer,
        AsyncAnswer,
        AsyncClient,
        Beam,
        BeamSearch,
        Candidate,
        Client,
        Delta,
        GivenPrompt,
        Message,
        ModelInfo,
        Resume,
        TokenLogprobs,
        Usage,
    )

__version__ = "0.1.0"
__all__ = [
    "AdminClient",
    "Answer",
    "AsyncAnswer",
    "AsyncClient",
    "Beam",
    "BeamSearch",
    "BugError",
    "Candidate",
    "CannotConnectError",
    "Client",
    "DeadlineError",
    "Delta",
    "DuplicateRequestError",
    "GivenPrompt",
    "InvalidRequestError",
    "Message",
    "ModelInfo",
    "OverloadedError",
    "PagekeeperError",
    "RequestError",
    "Resume",
    "SlowReaderError",
    "TokenLogprobs",
    "TryAgainError",
    "UnavailableError",
    "UnknownModelError",
    "Usage",
    "__version__",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - the type of each name is declared above
    # Every process imports this package; only those that use the client pay for gRPC.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pagekeeper import client

    return getattr(client, name)
