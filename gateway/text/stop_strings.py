"""Stop strings in a stream of text whose pieces end anywhere."""

from collections.abc import Sequence


class StopStrings:
    """Lets text through until one of `stops` is complete; holds back only what may still become one.

    The match that is complete first wins; among those that end together, the one that begins first. So the outcome
    depends on the text alone, not on where its pieces end.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """Take the next piece of text; returns the text let through and whether a stop string is complete."""
        text = self._held + piece
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            self._held = ""
            _, start = min(matches)
            return text[:start], True
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def flush(self) -> str:
        """The text has ended: returns what was held back."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    longest = min(len(stop) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
