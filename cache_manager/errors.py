"""What a caller learns of an error that nobody expected."""

import contextlib
import secrets
from collections.abc import AsyncIterator
from typing import Any

import grpc
import structlog

_log = structlog.get_logger()


@contextlib.asynccontextmanager
async def unexpected_errors(context: "grpc.aio.ServicerContext[Any, Any]") -> AsyncIterator[None]:
    """End the call with INTERNAL and an error id; the text goes to the log under that id."""
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except Exception:  # noqa: BLE001 (the last resort of a call: it must not reach the caller as text)
        error_id = secrets.token_hex(8)
        _log.exception("unexpected error", error_id=error_id)
        await context.abort(grpc.StatusCode.INTERNAL, f"internal error {error_id}")
