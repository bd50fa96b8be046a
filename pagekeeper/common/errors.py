"""Errors, named by who must act.

PagekeeperError
├── TryAgainError                 nothing is wrong with the request
│   ├── OverloadedError           the queue is full                      RESOURCE_EXHAUSTED
│   ├── SlowReaderError           the client does not read its stream    RESOURCE_EXHAUSTED
│   ├── UnavailableError          no runner within the wait              UNAVAILABLE
│   │   └── DrainingError         this server ends, another may serve    UNAVAILABLE
│   ├── DeadlineError             the answer took longer than allowed    DEADLINE_EXCEEDED
│   └── CannotConnectError        raised by clients: nobody answers      (none)
├── RequestError                  the client fixes the request
│   ├── InvalidRequestError       a field is wrong                       INVALID_ARGUMENT
│   ├── UnknownModelError         no such model                          NOT_FOUND
│   └── DuplicateRequestError     the request id is in use               ALREADY_EXISTS
├── ConfigurationError            the operator fixes the configuration   exit code 2
└── BugError                      a broken invariant; report it          INTERNAL

Translation to status codes happens at the edges of gateway and cache manager, by pagekeeper/common/rpc_errors.py, and
back in pagekeeper/status.py.
"""

from dataclasses import dataclass


class PagekeeperError(Exception):
    """Base of every error that Pagekeeper raises on purpose."""


class TryAgainError(PagekeeperError):
    """Nothing is wrong with the request; later it may succeed."""


class OverloadedError(TryAgainError):
    """The queue is full. `retry_after_s` says when to come back, in seconds."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SlowReaderError(TryAgainError):
    """The client left too much of its stream unread for too long; it can resume."""


class DeadlineError(TryAgainError):
    """The answer took longer than the client or the server allows."""


class UnavailableError(TryAgainError):
    """No one can serve this now. `tokens_emitted` counts what the client has received of the answer."""

    def __init__(self, message: str, tokens_emitted: int = 0) -> None:
        super().__init__(message)
        self.tokens_emitted = tokens_emitted


class DrainingError(UnavailableError):
    """This server ends. Another can serve this now, or the one that comes after it. Raised by servers alone."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


class CannotConnectError(TryAgainError):
    """Nobody answers at the address, or not who was expected. Raised by clients alone."""


class RequestError(PagekeeperError):
    """The client fixes the request."""


@dataclass(frozen=True)
class FieldViolation:
    """One wrong field: its path in the request message and what would be right."""

    field: str
    description: str


class InvalidRequestError(RequestError):
    """One or more fields are wrong; all that were found are named."""

    def __init__(self, *violations: FieldViolation) -> None:
        super().__init__("; ".join(f"{v.field}: {v.description}" for v in violations))
        self.violations = violations


class UnknownModelError(RequestError):
    """The request names a model that is not served."""


class DuplicateRequestError(RequestError):
    """The tenant has a live stream with this request id."""


class ConfigurationError(PagekeeperError):
    """The operator fixes the configuration. The message is one line and names what to change."""


class BugError(PagekeeperError):
    """An invariant is broken."""
