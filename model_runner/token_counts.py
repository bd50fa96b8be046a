"""How often a text has each of its tokens, kept up to date one token at a time."""

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class TokenCounts:
    """Counts of a sequence's first tokens. They follow from these alone, so they can be made anew at any time.

    Args:
        num_prompt_tokens: so many tokens of the sequence are not of the answer.
        lists_prompt: the prompt's tokens are listed too, with how often the answer has them: most 0 times.
    """

    def __init__(self, num_prompt_tokens: int, lists_prompt: bool) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._lists_prompt = lists_prompt
        self._token_ids: list[int] = []
        self._num_counted = 0
        self._places: dict[int, int] = {}
        self._entries = np.empty((2, 16), np.int64)

    @property
    def entries(self) -> Ints:
        """[2, n]: each token once, and how often the answer has it. Valid until more is counted."""
        return self._entries[:, : len(self._places)]

    def count(self, token_ids: list[int], length: int) -> None:
        """Count the first `length` tokens of the sequence.

        Anew if they are fewer than before, or another list, as that of a beam which takes over where its parent is;
        else those that were counted before have not changed.
        """
        if length < self._num_counted or token_ids is not self._token_ids:
            self._token_ids, self._num_counted = token_ids, 0
            self._places.clear()
        first, middle = self._num_counted, min(self._num_prompt_tokens, length)
        if first < middle and self._lists_prompt:
            for token_id in dict.fromkeys(token_ids[first:middle]):
                self._add(token_id, 0)
        for token_id in token_ids[max(first, middle) : length]:
            self._add(token_id, 1)
        self._num_counted = length

    def of(self, token_id: int) -> int:
        """How often the answer has this token."""
        place = self._places.get(token_id)
        return 0 if place is None else int(self._entries[1, place])

    def _add(self, token_id: int, times: int) -> None:
        place = self._places.get(token_id)
        if place is None:
            place = self._places[token_id] = len(self._places)
            if place == self._entries.shape[1]:
                self._entries = np.concatenate((self._entries, np.empty_like(self._entries)), axis=1)
            self._entries[:, place] = token_id, 0
        self._entries[1, place] += times
