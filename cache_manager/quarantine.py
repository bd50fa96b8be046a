"""The time between a runner's death and the end of its device work."""

import asyncio
import os
from collections.abc import Callable
from functools import partial
from typing import Protocol

import structlog

from pagekeeper.common.ids import Epoch

_log = structlog.get_logger()


class Timer(Protocol):
    """One that has been started."""

    def cancel(self) -> None:
        """It will not fire."""
        ...


def _call_later(delay_s: float, callback: Callable[[], None]) -> Timer:
    return asyncio.get_running_loop().call_later(delay_s, callback)


class Quarantine:
    """Keeps quarantined sessions until their runner's process is gone and the settle time after that has passed.

    Nothing is polled: a pidfd becomes readable when its process has ended, and then one timer runs.

    Args:
        settle: is called once for each session whose device work has ended.
        settle_s: how long after the end of its process a runner's device work may still write, in seconds.
        call_later: starts a timer; the event loop's unless a test has its own.
    """

    def __init__(
        self,
        settle: Callable[[Epoch], None],
        settle_s: float,
        call_later: Callable[[float, Callable[[], None]], Timer] = _call_later,
    ) -> None:
        self._settle = settle
        self._settle_s = settle_s
        self._call_later = call_later
        self._pidfds: set[int] = set()
        """Of runners whose processes have not ended."""
        self._timers: dict[Epoch, Timer] = {}

    def hold(self, epochs: list[Epoch], pidfd: int) -> None:
        """Settle the sessions of one runner when it is time. The pidfd is closed here."""
        self._pidfds.add(pidfd)
        asyncio.get_running_loop().add_reader(pidfd, self._process_ended, epochs, pidfd)

    def close(self) -> None:
        """Settle nothing any more."""
        for pidfd in list(self._pidfds):
            self._let_go(pidfd)
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _process_ended(self, epochs: list[Epoch], pidfd: int) -> None:
        self._let_go(pidfd)
        for epoch in epochs:
            self._timers[epoch] = self._call_later(self._settle_s, partial(self._settled, epoch))

    def _settled(self, epoch: Epoch) -> None:
        del self._timers[epoch]
        self._settle(epoch)
        _log.info("quarantine ended", epoch=epoch)

    def _let_go(self, pidfd: int) -> None:
        self._pidfds.remove(pidfd)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
