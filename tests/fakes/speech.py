"""A runner that recites; many of its tokens are parts of characters."""

from collections.abc import Sequence

from tests.fakes.tokenizer import byte_level_tokenizer

WORDS = "Größe, naïve, café, 東京 🦉🏽, e\u0301, نص, \u2028 and \x00. "
SPOKEN = byte_level_tokenizer().encode(WORDS * 3).ids


def spoken(seed: int, position: int, prompt: Sequence[int]) -> int:
    """For `Script.token`."""
    return SPOKEN[position % len(SPOKEN)]
