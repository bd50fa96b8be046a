"""Text of an answer as its tokens arrive: never half a character, and nothing that has to be taken back."""

from collections.abc import Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"


class Decoder(Protocol):
    """What is to be known of a tokenizer."""

    def decode(self, token_ids: Sequence[int], /) -> str:
        """Text of an answer with these tokens."""

    def is_silent(self, token_id: int, /) -> bool:
        """Whether the token has no text wherever it stands: special tokens, and ids that name no token."""

    def is_byte(self, token_id: int, /) -> bool:
        """Whether the token stands for one byte in a decoder with byte fallback."""


class Detokenizer:
    """Turns the growing token ids of one answer into pieces of text whose join is the decoding of all of them.

    What a token adds to the text depends on its neighbours: some decoders drop a leading space at the very start, and a
    character's bytes may be spread over tokens. So the tokens of the last emitted piece are decoded again together
    with the new ones, and only the difference is emitted. The cost of a token does not grow with the answer.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; returns the text that is now certain, however the tokens are divided over calls."""
        tried = len(self._pending)
        self._pending += [token_id for token_id in token_ids if not self._decoder.is_silent(token_id)]
        for length in range(len(self._pending), tried, -1):
            piece = self._certain_text(self._pending[:length])
            if piece:
                self._context, self._pending = self._pending[:length], self._pending[length:]
                self._context_text = self._decoder.decode(self._context)
                return piece
        return ""

    def flush(self) -> str:
        """The answer has ended: returns the rest, with a replacement character for a sequence that stayed open."""
        text = self._decoder.decode([*self._context, *self._pending])
        piece = text[len(self._context_text) :]
        self._context, self._pending, self._context_text = [], [], ""
        return piece

    def _certain_text(self, token_ids: list[int]) -> str:
        """The text of the next tokens, or nothing where a later token can still change its end."""
        # A run of bytes is decoded as a whole: to characters if all of it is valid, else byte by byte to replacements.
        if self._decoder.is_byte(token_ids[-1]):
            return ""
        text = self._decoder.decode([*self._context, *token_ids])
        # A pending sequence of UTF-8 shows as a replacement character.
        return "" if text.endswith(_REPLACEMENT) else text[len(self._context_text) :]
