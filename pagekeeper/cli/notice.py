"""What a terminal shows while the connection is lost."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

RECONNECTING = "reconnecting…"
# Save the cursor's place and write there, dim and without wrapping: that could scroll, and then the saved place would
# be another one.
_SHOW = f"\x1b7\x1b[?7l\x1b[2m {RECONNECTING}\x1b[0m\x1b[?7h"
# Go back there and wipe out what follows.
_HIDE = "\x1b8\x1b[K"


class Notice:
    """Of a lost connection. Nothing is shown unless whoever prints the answer replaces `show`."""

    def __init__(self) -> None:
        self.show: Callable[[], None] = lambda: None


class CursorNotice:
    """A word at the cursor, in the middle of an answer, which leaves no trace.

    Args:
        console: nothing is shown if it is no terminal.
    """

    def __init__(self, console: "Console") -> None:
        self._console = console
        self._is_shown = False

    def show(self) -> None:
        """Show it, until `hide`."""
        if self._console.is_terminal and not self._is_shown:
            self._is_shown = True
            self._write(_SHOW)

    def hide(self) -> None:
        """Wipe it out, if it is shown."""
        if self._is_shown:
            self._is_shown = False
            self._write(_HIDE)

    def _write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()
