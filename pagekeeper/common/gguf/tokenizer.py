"""From the tokenizer in a GGUF file's metadata to tokenizer.json and tokenizer_config.json.

A byte-level vocabulary (GPT-2, Llama 3, Qwen, SmolLM) comes with merges, and with the name of a way to split text
before merging. GGUF names that way but does not describe it, so each has to be written down here; one that is not is an
error, since a guess would tokenize almost right. A SentencePiece vocabulary (Llama 2, Mistral) comes with scores, from
which the merges follow.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from pagekeeper.common.errors import ConfigurationError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPACE = "▁"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS_AND_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class _Splitting:
    """How the vocabularies of one name prepare text."""

    steps: tuple[Any, ...]
    """Pre-tokenizers, of which the last turns bytes into the vocabulary's letters."""
    compose: bool = False
    """Whether text is brought into Unicode's composed form first."""
    whole_words: bool = False
    """Whether a word that is a token is taken as it is, merges or no."""
    adds_bos: bool = False
    """Whether a text begins with the token for that, if the file does not say."""


def _by_digits(most: int) -> tuple[Any, ...]:
    pattern = Regex(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,{most}}}|{_SYMBOLS_AND_SPACES}")
    return pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def _splitting(name: object) -> _Splitting:
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    match name:
        case "gpt-2":
            return _Splitting((words,))
        case "smollm":
            return _Splitting((pre_tokenizers.Digits(individual_digits=True), words))
        case "llama-bpe":
            return _Splitting(_by_digits(3), whole_words=True, adds_bos=True)
        case "qwen2":
            return _Splitting(_by_digits(1), compose=True)
    raise ConfigurationError(
        f"model: the GGUF tokenizer splits text in a way that is not supported, {name!r} (supported: gpt-2, smollm, "
        "llama-bpe, qwen2); put the model's tokenizer.json next to it and give the directory"
    )


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that the metadata describes.

    Raises:
        ConfigurationError: it is of a kind that is not supported, or its description is not whole.
    """
    kind = metadata.get("tokenizer.ggml.model")
    vocabulary = _Vocabulary(metadata)
    try:
        match kind:
            case "gpt2":
                splitting = _splitting(metadata.get("tokenizer.ggml.pre"))
                tokenizer, adds_bos = _byte_level(vocabulary, splitting), splitting.adds_bos
            case "llama":
                tokenizer, adds_bos = _sentencepiece(vocabulary), True
            case _:
                raise ConfigurationError(
                    f"model: a GGUF tokenizer of kind {kind!r} is not supported; supported: gpt2, llama"
                )
        tokenizer.add_special_tokens(
            [AddedToken(token, special=True, normalized=False) for token in vocabulary.of_type(_CONTROL, _UNKNOWN)]
        )
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token in vocabulary.of_type(_USER_DEFINED)])
    except ConfigurationError:
        raise
    except Exception as error:  # the tokenizers library raises nothing more specific
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"model: the GGUF tokenizer is damaged: {reason}") from error
    bos = vocabulary.special("bos")
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", adds_bos):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, vocabulary.ids[bos])]
        )
    return tokenizer


def tokenizer_config_from_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The content of tokenizer_config.json: special tokens, chat template, longest input.

    Raises:
        ConfigurationError: the description of the tokenizer is not whole.
    """
    vocabulary = _Vocabulary(metadata)
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: vocabulary.special(theirs) for name, theirs in names.items()},
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.get(f"{metadata.get('general.architecture')}.context_length"),
        "chat_template": metadata.get("tokenizer.chat_template"),
    }
    return {name: value for name, value in content.items() if value is not None}


class _Vocabulary:
    """The tokens of the metadata, checked.

    Attributes:
        tokens: by id.
        ids: by token.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.tokens: list[str] = self.listed("tokens", str)
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            raise ConfigurationError("model: the GGUF tokenizer has a token twice")
        self._types: list[int] = self.listed("token_type", int)

    def listed(self, name: str, kind: type) -> list[Any]:
        """An array of the metadata; all but the merges have an entry for each token."""
        values = self._metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            raise ConfigurationError(f"model: tokenizer.ggml.{name} is missing or of a wrong type")
        if name not in ("tokens", "merges") and len(values) != len(self.tokens):
            raise ConfigurationError(f"model: tokenizer.ggml.{name} has not one entry for each token")
        return values

    def of_type(self, *types: int) -> list[str]:
        """Tokens of these types, by id."""
        return [token for token, kind in zip(self.tokens, self._types, strict=True) if kind in types]

    def special(self, name: str) -> str | None:
        """The token that the metadata names for a purpose, if any."""
        token_id = self._metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is None:
            return None
        if type(token_id) is not int or not 0 <= token_id < len(self.tokens):
            raise ConfigurationError(f"model: tokenizer.ggml.{name}_token_id names no token")
        return self.tokens[token_id]

    def flag(self, name: str, default: bool) -> bool:
        """A boolean of the metadata."""
        return bool(self._metadata.get(f"tokenizer.ggml.{name}", default))


def _byte_level(vocabulary: _Vocabulary, splitting: _Splitting) -> Tokenizer:
    merges = [tuple(merge.split(" ")) for merge in vocabulary.listed("merges", str)]
    tokenizer = Tokenizer(BPE(vocabulary.ids, merges, ignore_merges=splitting.whole_words))
    if splitting.compose:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(splitting.steps))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    missing = [byte for byte in range(256) if f"<0x{byte:02X}>" not in vocabulary.ids]
    if missing or vocabulary.flag("remove_extra_whitespaces", False) or vocabulary.flag("precompiled_charsmap", False):
        raise ConfigurationError("model: a SentencePiece tokenizer that rewrites text or lacks bytes is not supported")
    tokenizer = Tokenizer(
        BPE(
            vocabulary.ids,
            list(_merges_by_score(vocabulary)),
            unk_token=vocabulary.special("unknown"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = vocabulary.flag("add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    decoding: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*decoding, decoders.Strip(" ", 1, 0)] if prefix else decoding)
    return tokenizer


def _merges_by_score(vocabulary: _Vocabulary) -> Iterator[tuple[str, str]]:
    """SentencePiece merges the neighbours whose join scores highest; so pairs in order of the score of their join.

    Raises:
        ConfigurationError: two joins have the same score, so that their order depends on the text.
    """
    scores: Sequence[float] = vocabulary.listed("scores", float)
    normal = set(vocabulary.of_type(_NORMAL))
    pairs = {}
    for token in normal:
        splits = [(token[:i], token[i:]) for i in range(len(token) - 1, 0, -1)]
        parts = [(left, right) for left, right in splits if left in normal and right in normal]
        if parts:
            pairs[token] = parts
    by_score = sorted(pairs, key=lambda token: -scores[vocabulary.ids[token]])
    if len({scores[vocabulary.ids[token]] for token in by_score}) != len(by_score):
        raise ConfigurationError("model: the GGUF tokenizer gives several tokens the same score; use tokenizer.json")
    for token in by_score:
        yield from pairs[token]
