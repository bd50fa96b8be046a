"""Poll with a deadline."""

import asyncio
import time
from collections.abc import Awaitable, Callable

RECOVERY_LIMIT_S = 120.0
POLL_S = 0.02


class NoRecoveryError(Exception):
    """The server does not get over a fault."""


async def until(condition: Callable[[], Awaitable[bool]], what: str, poll_s: float = POLL_S) -> None:
    """Wait for a condition.

    Args:
        condition: what is waited for.
        what: the same in words.
        poll_s: between two looks, in seconds.

    Raises:
        NoRecoveryError: it does not come true in time.
    """
    deadline = time.monotonic() + RECOVERY_LIMIT_S
    while not await condition():
        if time.monotonic() > deadline:
            raise NoRecoveryError(f"not within {RECOVERY_LIMIT_S:g} s: {what}")
        await asyncio.sleep(poll_s)
