"""Stop strings in a stream of text whose pieces end anywhere."""

from collections.abc import Iterator, Sequence


class StopStrings:
    """Lets text through until one of `stops` is complete; holds back only what may still become one.

    The match that is complete first wins; among those that end together, the one that begins first. So the outcome
    depends on the text alone, not on where its pieces end.

    Args:
        stops: the strings.
        include: the text ends behind the stop string, not before it.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = stops
        self._includes = include
        self._held = ""

    def push(self, piece: str, *, may_stop: bool = True) -> tuple[str, bool]:
        """Take the next piece of text; returns the text let through and whether a stop string is complete.

        With `may_stop` False, those that this piece completes do not count.
        """
        text = self._held + piece
        matches = list(self._matches_within(text)) if may_stop else []
        if matches:
            self._held = ""
            end, start = min(matches)
            return text[: end if self._includes else start], True
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def flush(self) -> str:
        """The text has ended: returns what was held back."""
        held, self._held = self._held, ""
        return held

    def _matches_within(self, text: str) -> Iterator[tuple[int, int]]:
        """End and start of each string's first match that was not complete with what is held back."""
        for stop in self._stops:
            start = text.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0:
                yield start + len(stop), start


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    longest = min(len(stop) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
