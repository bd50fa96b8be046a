"""Poll with a deadline."""

import asyncio
import time
from collections.abc import Awaitable, Callable

RECOVERY_LIMIT_S = 120.0
_POLL_S = 0.02


class NoRecoveryError(Exception):
    """The server does not get over a fault."""


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait for a condition.

    Raises:
        NoRecoveryError: it does not come true in time.
    """
    deadline = time.monotonic() + RECOVERY_LIMIT_S
    while not await condition():
        if time.monotonic() > deadline:
            raise NoRecoveryError(f"not within {RECOVERY_LIMIT_S:g} s: {what}")
        await asyncio.sleep(_POLL_S)
