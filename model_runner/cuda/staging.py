"""Pinned memory between the host and a device."""

import numpy as np
import numpy.typing as npt
import torch

from model_runner.cuda.queue import Event, Queue
from pagekeeper.common.errors import BugError


class Staging:
    """Where one step's inputs are laid out, and where its tokens arrive. Two of them are used in turn.

    Args:
        queue: pins the memory.
        num_words: most words of a step's inputs.
        num_tokens: most tokens that a step samples.
    """

    def __init__(self, queue: Queue, num_words: int, num_tokens: int) -> None:
        self._words = queue.pin(num_words)
        self.tokens = queue.pin(num_tokens)
        self._copied: Event | None = None

    def reserve(self, num_words: int) -> npt.NDArray[np.int64]:
        """The first `num_words` words, to be written; waits until the copy of what they hold has ended."""
        if num_words > len(self._words):
            raise BugError(f"a step's inputs take {num_words} words, and {len(self._words)} was to be the most")
        if self._copied is not None:
            self._copied.synchronize()
        words: npt.NDArray[np.int64] = self._words[:num_words].numpy()
        return words

    def copy_to(self, destination: torch.Tensor, queue: Queue) -> None:
        """Queue the copy of as many words as `destination` has."""
        words = self._words[: len(destination)]
        queue.run(lambda: _copy(destination, words))
        self._copied = queue.record()


def _copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    destination.copy_(source, non_blocking=True)
