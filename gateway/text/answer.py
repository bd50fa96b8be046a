"""One answer on its way to the client: its tokens become text, and stop strings end it."""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.finish_reason import FinishReason
from gateway.text.detokenizer import Detokenizer
from gateway.text.stop_strings import StopStrings


@dataclass(frozen=True)
class Piece:
    """What one push adds to the answer.

    Attributes:
        token_ids: the tokens taken; with a stop string, those up to and including the one that completed it.
        text: the text that is now certain; with a stop string, it ends before the stop string.
        finish_reason: why this is the last piece, if it is.
    """

    token_ids: Sequence[int]
    text: str
    finish_reason: FinishReason | None


class Answer:
    """State of detokenisation and stop strings: a function of the answer's tokens alone.

    So pushing the tokens that a client has received already rebuilds exactly the state behind the text that it has.

    Args:
        detokenizer: of the answer alone, or behind the tokens of another that it continues.
        stops: stop strings.
        min_tokens: a stop string that is complete before so many tokens does not count.
        include_stop: whether the stop string is part of the text.
    """

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str], *, min_tokens: int = 0, include_stop: bool = False
    ) -> None:
        self._detokenizer = detokenizer
        self._stop_strings = StopStrings(stops, include=include_stop)
        self._watches_each_token = bool(stops)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._has_stopped = False

    def push(self, token_ids: Sequence[int], finish_reason: FinishReason | None = None) -> Piece:
        """Take the next tokens; `finish_reason` says that they are the last."""
        if self._has_stopped:
            return Piece([], "", FinishReason.STOP)
        # Only a search for stop strings must know which token completed one.
        steps = [[token_id] for token_id in token_ids] if self._watches_each_token else [token_ids]
        texts = []
        for taken, step in enumerate(steps, start=1):
            self._num_tokens += len(step)
            text, stopped = self._search(self._detokenizer.push(step))
            texts.append(text)
            if stopped:
                return Piece(token_ids[:taken], "".join(texts), FinishReason.STOP)
        if finish_reason is None:
            return Piece(token_ids, "".join(texts), finish_reason)
        text, stopped = self._search(self._detokenizer.flush())
        texts.append(text if stopped else text + self._stop_strings.flush())
        return Piece(token_ids, "".join(texts), FinishReason.STOP if stopped else finish_reason)

    def _search(self, text: str) -> tuple[str, bool]:
        found = self._stop_strings.push(text, may_stop=self._num_tokens >= self._min_tokens)
        _, self._has_stopped = found
        return found
