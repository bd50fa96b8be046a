"""Processes that can be killed or stopped at any message, and between any two effects of what they do."""

from collections import deque
from collections.abc import Callable, Generator
from typing import Any, TypeAlias, TypeVar

from tests.simulation.world import World

Value = TypeVar("Value")
Waiting: TypeAlias = Generator[Callable[[], object], None, Value]
"""What a thread of a process does. It yields what it waits for, to be asked again whenever something has happened."""


class Killed(BaseException):
    """Unwinds what a process was doing when it was killed. No code under test may catch it, so it is no Exception."""


class Process:
    """Base of everything that can die. A process that is started again is another object under the same name.

    Whatever reaches it from outside goes through `run`, whatever it does to the outside through `effect`; in between
    lies nothing that others could see.
    """

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.is_alive = True
        self.is_stopped = False
        self.stopped_at = 0.0
        self.fuse: tuple[int, Callable[[Process], None]] | None = None
        """After how many more effects something happens to it, and what."""
        self.on_death: Callable[[Process], object] = _nothing
        self._backlog: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._held: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()

    def start(self) -> None:
        """Begin its life."""

    def run(self, handler: Callable[..., object], *arguments: Any) -> None:
        """Handle something that has come, now or when the process goes on."""
        if not self.is_alive:
            return
        if self.is_stopped:
            self._backlog.append((handler, arguments))
            return
        try:
            handler(*arguments)
        except Killed:
            return

    def after(self, delay: float, handler: Callable[..., object], *arguments: Any) -> None:
        """A timer of the process."""
        self.world.after(delay, self.run, handler, *arguments)

    def effect(self, act: Callable[..., object], *arguments: Any) -> None:
        """Do something that others can see, unless the process is killed just before."""
        if self.fuse is not None:
            count, strike = self.fuse
            self.fuse = (count - 1, strike) if count > 1 else None
            if count <= 1:
                strike(self)
                if not self.is_alive:
                    raise Killed
        if self.is_stopped:
            self._held.append((act, arguments))
        else:
            act(*arguments)

    def kill(self) -> None:
        """End: by SIGKILL, or by itself."""
        if self.is_alive:
            self.is_alive = False
            self.died()
            self.on_death(self)

    def stop(self) -> None:
        """SIGSTOP."""
        if self.is_alive and not self.is_stopped:
            self.is_stopped = True
            self.stopped_at = self.world.now
            self.world.note(self.name, "stopped")

    def go_on(self) -> None:
        """SIGCONT: first what it was in the middle of, then what has come since."""
        if not self.is_alive or not self.is_stopped:
            return
        self.is_stopped = False
        self.world.note(self.name, "goes on")
        while self._held and self.is_alive and not self.is_stopped:
            act, arguments = self._held.popleft()
            act(*arguments)
        while self._backlog and self.is_alive and not self.is_stopped:
            handler, arguments = self._backlog.popleft()
            self.run(handler, *arguments)
        self.run(self.on_going_on)

    def on_going_on(self) -> None:
        """It goes on after a stop."""

    def died(self) -> None:
        """It is dead: nothing of it runs any more."""


def _nothing(_: Process) -> None:
    pass
