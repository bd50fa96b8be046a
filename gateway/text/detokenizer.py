"""Text of an answer as its tokens arrive: never half a character, and nothing that has to be taken back."""

from collections.abc import Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"
# At most three bytes of UTF-8 are an open sequence, each a token at worst, behind one token for decoders that treat the
# first differently.
_CONTEXT_TOKENS = 4


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
    character's bytes may be spread over tokens. So the last few tokens are decoded again together with the new ones,
    and only the difference is emitted. The cost of a token does not grow with the answer.

    All but a replacement character at the end is certain: an open sequence of UTF-8 shows as one, and is all that later
    tokens can change. But a run of byte tokens is decoded as a whole, to characters if all of it is valid, else byte by
    byte to replacements; so nothing of it is certain before it ends.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._context: list[int] = []
        self._emitted = 0
        self._byte_run: list[int] = []

    def fork(self) -> "Detokenizer":
        """Another that has seen the same tokens and goes on by itself."""
        child = Detokenizer(self._decoder)
        child._context, child._byte_run = [*self._context], [*self._byte_run]
        child._emitted = self._emitted
        return child

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; returns the text that is now certain, however the tokens are divided over calls."""
        new = [token_id for token_id in token_ids if not self._decoder.is_silent(token_id)]
        settled = len(new)
        while settled and self._decoder.is_byte(new[settled - 1]):
            settled -= 1
        if not settled:
            self._byte_run += new
            return ""
        tokens = [*self._context, *self._byte_run, *new[:settled]]
        piece = self._certain_text(tokens)[self._emitted :]
        self._context = tokens[-_CONTEXT_TOKENS:]
        self._emitted = len(self._certain_text(self._context))
        self._byte_run = new[settled:]
        return piece

    def flush(self) -> str:
        """The answer has ended: returns the rest, with a replacement character for a sequence that stayed open."""
        text = self._decoder.decode([*self._context, *self._byte_run])
        piece = text[self._emitted :]
        self._context, self._emitted, self._byte_run = [], 0, []
        return piece

    def _certain_text(self, token_ids: list[int]) -> str:
        return self._decoder.decode(token_ids).removesuffix(_REPLACEMENT)
