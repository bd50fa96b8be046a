"""From the policy's events to those who watch them, each at his own pace and none for longer than he keeps up."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator

from cache_manager.events import BlocksRemoved, CacheEvent
from cache_manager.sessions import CachePolicy
from pagekeeper.common.errors import SlowReaderError

BUFFER_EVENTS = 8192
"""Events that may wait for one watcher; a sealed block of 16 tokens takes about half a kilobyte."""
_BLOCKS_AT_ONCE = 512
"""So many blocks, or those of one flush's slice, make one message: far below the limit of its size."""


class Watcher:
    """One reader of events. Lives on the manager's event loop."""

    def __init__(self, buffer_events: int) -> None:
        self._buffer_events = buffer_events
        self._events: deque[CacheEvent] = deque()
        self._arrived = asyncio.Event()
        self._is_too_slow = False

    def push(self, event: CacheEvent) -> None:
        """Keep an event for the reader, unless he has left too many."""
        if len(self._events) >= self._buffer_events:
            self._is_too_slow = True
            self._events.clear()
        if not self._is_too_slow:
            self._events.append(event)
        self._arrived.set()

    async def next_events(self) -> list[CacheEvent]:
        """Wait for events and take them, with a few hundred blocks at a time.

        Raises:
            SlowReaderError: events had to be dropped, so those that follow would make no sense.
        """
        await self._arrived.wait()
        if self._is_too_slow:
            raise SlowReaderError(f"{self._buffer_events} events waited to be read; start over with what is cached")
        events: list[CacheEvent] = []
        num_blocks = 0
        while self._events and num_blocks < _BLOCKS_AT_ONCE:
            event = self._events.popleft()
            events.append(event)
            num_blocks += len(event.block_hashes) if isinstance(event, BlocksRemoved) else 1
        if not self._events:
            self._arrived.clear()
        return events


class EventFeed:
    """All the watchers of one policy. While there are none the policy tells nobody."""

    def __init__(self, policy: CachePolicy, buffer_events: int = BUFFER_EVENTS) -> None:
        self._policy = policy
        self._buffer_events = buffer_events
        self._watchers: set[Watcher] = set()

    @contextlib.contextmanager
    def watch(self) -> Iterator[Watcher]:
        """Every event from now on, for one reader."""
        watcher = Watcher(self._buffer_events)
        self._watchers.add(watcher)
        self._policy.listen(self._pass_on)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)
            if not self._watchers:
                self._policy.listen(None)

    def _pass_on(self, event: CacheEvent) -> None:
        for watcher in self._watchers:
            watcher.push(event)
