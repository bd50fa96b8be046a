"""A model's tokenizer: text and chat messages to token ids, token ids to text."""

import json
import re
import secrets
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from gateway.text.chat_template import ChatTemplate
from gateway.text.detokenizer import Detokenizer
from pagekeeper.common.errors import FieldViolation, InvalidRequestError


class ChatTurn(NamedTuple):
    """One message of a chat."""

    role: str
    content: str


class TextTokenizer:
    """Wraps a `tokenizer.json` and, where the model has one, its chat template.

    In a plain text prompt the names of special tokens stand for those tokens, as everywhere. In a chat only the
    template may write them; typed by a user they stay text (`encode_chat`).

    Args:
        definition: the content of tokenizer.json.
        chat_template: None for a model without one.

    Attributes:
        vocab_size: one more than the highest token id; the model's own vocabulary may be padded beyond it.
        longest_token: in characters of its name, which are as many as those of its text, or more.
    """

    def __init__(self, definition: str, chat_template: ChatTemplate | None = None) -> None:
        content = json.loads(definition)
        self._tokenizer = _untruncated(definition)
        self._chat_template = chat_template
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._guard = _SpecialTokenGuard(content)
        self._byte_tokens = _byte_tokens(self._tokenizer, content["decoder"])
        vocab = self._tokenizer.get_vocab()
        self.vocab_size: int = max(vocab.values()) + 1
        self.longest_token: int = max(map(len, vocab))

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain text prompt, with the tokens that the model wants at its start."""
        return _ids(self._tokenizer, text)

    def word_token_ids(self, word: str) -> list[list[int]]:
        """The token sequences that a word is made of: at the start of a text, behind a space, and within a line."""
        line_start = _ids(self._tokenizer, "\n", add_special_tokens=False)
        texts = (_ids(self._tokenizer, text, add_special_tokens=False) for text in (word, f" {word}", f"\n{word}"))
        alone, behind_space, in_line = texts
        # Some tokenizers put a space before every text. Behind other tokens the word shows without it.
        found = [alone, behind_space]
        if in_line[: len(line_start)] == line_start:
            found.append(in_line[len(line_start) :])
        return [list(ids) for ids in dict.fromkeys(map(tuple, found)) if ids]

    def encode_chat(self, turns: tuple[ChatTurn, ...]) -> list[int]:
        """Token ids of the rendered chat template.

        Without special-token text in any content this is the plain encoding of the plain rendering. With it, the guard
        keeps the user's text apart from the template's tokens.

        Raises:
            InvalidRequestError: the model has no chat template, or it refuses the messages.
        """
        if self._chat_template is None:
            raise InvalidRequestError(FieldViolation("chat", "this model has no chat template; send text or token_ids"))
        masked = tuple(turn._replace(content=self._guard.mask(turn.content)) for turn in turns)
        rendered = self._chat_template.render([turn._asdict() for turn in masked])
        if masked != turns:
            return self._guard.encode(rendered)
        return _ids(self._tokenizer, rendered, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of an answer with these tokens; special tokens have none."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def is_silent(self, token_id: int) -> bool:
        """Whether the token has no text wherever it stands: special tokens, and ids that name no token."""
        return token_id in self._special_ids or self._tokenizer.id_to_token(token_id) is None

    def is_byte(self, token_id: int) -> bool:
        """Whether the token stands for one byte in a decoder with byte fallback."""
        return token_id in self._byte_tokens

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental decoder, for one answer."""
        return Detokenizer(self)

    def token_id(self, token: str) -> int | None:
        """The id of a token by its exact name."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found


class _SpecialTokenGuard:
    """Encodes a rendered chat in which a user's text holds names of special tokens, which must stay text.

    `mask` hides the first character of every such name in a user's text, and of every beginning of one at its end, so
    that after rendering each whole name is the template's own. `encode` gives the template's names a secret prefix,
    uncovers the masks, and uses a second tokenizer that knows the special tokens by their secret names alone: one pass,
    split at the same places as the plain encoding, in which no user can name a special token.
    """

    def __init__(self, content: dict[str, Any]) -> None:
        self._secret = secrets.token_hex(16)
        self._mask = secrets.token_hex(16)
        special = [token for token in content["added_tokens"] if token["special"]]
        self._names = sorted((token["content"] for token in special), key=len, reverse=True)
        self._any_name = re.compile("|".join(map(re.escape, self._names)) or r"(?!)")
        self._any_mask = re.compile(self._mask + "([0-9a-f]{6})")
        ids = {token["content"]: token["id"] for token in special}
        renamed = [token | {"content": self._secret + token["content"]} for token in special]
        others = [token for token in content["added_tokens"] if not token["special"]]
        self._tokenizer = _untruncated(json.dumps(content | {"added_tokens": others + renamed}))
        self._real_ids = {self._tokenizer.token_to_id(self._secret + name): ids[name] for name in self._names}

    def mask(self, text: str) -> str:
        starts = {*self._starts_of_names(text), *self._starts_of_cut_off_names(text)}
        if not starts:
            return text
        return "".join(f"{self._mask}{ord(c):06x}" if i in starts else c for i, c in enumerate(text))

    def _starts_of_names(self, text: str) -> Iterator[int]:
        """Where names begin; they may overlap."""
        match = self._any_name.search(text)
        while match is not None:
            yield match.start()
            match = self._any_name.search(text, match.start() + 1)

    def _starts_of_cut_off_names(self, text: str) -> Iterator[int]:
        """Where the text ends with the beginning of a name, which the template's own text might complete."""
        longest = max(map(len, self._names), default=0)
        for start in range(max(0, len(text) - longest + 1), len(text)):
            if any(name.startswith(text[start:]) for name in self._names):
                yield start

    def encode(self, rendered: str) -> list[int]:
        secret_names = self._any_name.sub(lambda match: self._secret + match[0], rendered)
        text = self._any_mask.sub(lambda match: chr(int(match[1], 16)), secret_names)
        encoded = _ids(self._tokenizer, text, add_special_tokens=False)
        return [self._real_ids.get(token_id, token_id) for token_id in encoded]


def _ids(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a text. A batch of one: `encode` itself keeps other threads from running, a second a megabyte."""
    ids: list[int] = tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
    return ids


def _untruncated(definition: str) -> Tokenizer:
    tokenizer = Tokenizer.from_str(definition)
    # Limits of the training set-up that some files still carry.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _byte_tokens(tokenizer: Tokenizer, decoder: object) -> frozenset[int]:
    """Tokens that a byte-fallback decoder joins to characters; empty for other decoders."""
    if "ByteFallback" not in json.dumps(decoder):
        return frozenset()
    ids = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(token_id for token_id in ids if token_id is not None)
