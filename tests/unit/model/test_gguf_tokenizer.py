"""Tokenizers described by GGUF metadata, against the libraries that define them."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import GPT2Tokenizer, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

from pagekeeper.common.errors import ConfigurationError
from pagekeeper.common.gguf.tokenizer import tokenizer_config_from_gguf, tokenizer_from_gguf

TEXTS = [
    "The capital of France is Paris.",
    "It's we'RE they'Ll I'd don'T, 'quoted' o'clock",
    "1 12 123 1234 12345 3.14159 x1y22z333 ½ ² ٣٤٥ 一二三",
    "  two  leading,   three\tinside\t\tand trailing   ",
    "line\nline\n\nline\r\n\r\n  indented\n\t\tcode();  // comment\n",
    "def f(x):\n    return {'a': [x ** 2, -1]} != None  # !?\n",
    "Größe, naïve, café, e\u0301 \u1e9b\u0323, 東京、🙂👍🏽 Здравствуй мир שלום",
    "a.b,c;d:e!f?g(h)i[j]k{l}m<n>o@p#q$r%s^t&u*v_w+x=y|z~",
    "\u00a0\u2003odd\u200bspaces\u3000here \n ",
    "",
    " ",
]
TWO_CONTROL_TOKENS = ["<bos>", "<eos>"]


@pytest.fixture(scope="module")
def byte_level() -> dict[str, Any]:
    """Metadata of a vocabulary whose merges run across words, so that splitting text in another way shows."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = BpeTrainer(
        vocab_size=900,
        special_tokens=TWO_CONTROL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(3 * TEXTS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in TWO_CONTROL_TOKENS else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def vocabulary(metadata: dict[str, Any]) -> tuple[dict[str, int], list[tuple[str, ...]]]:
    tokens = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    return tokens, [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]


def reference(kind: str, metadata: dict[str, Any]) -> Tokenizer:
    """The same vocabulary behind the splitting that its own library applies."""
    tokens, merges = vocabulary(metadata)
    if kind == "qwen2":
        return Qwen2Tokenizer(tokens, merges).backend_tokenizer
    if kind == "gpt-2":
        return GPT2Tokenizer(tokens, merges).backend_tokenizer
    tokenizer = Tokenizer(BPE(tokens, merges, ignore_merges=kind == "llama-bpe"))
    to_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if kind == "llama-bpe":
        steps = [pre_tokenizers.Split(Regex(TikTokenConverter().pattern), "isolated")]
    else:  # SmolLM's own tokenizer.json is GPT-2's splitting after one that isolates each digit
        words = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
        steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in (r"\p{N}", words)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, to_letters])
    return tokenizer


@pytest.mark.parametrize("kind", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_text_is_split_as_the_models_own_library_splits_it(
    kind: str, text: str, byte_level: dict[str, Any]
) -> None:
    ours = tokenizer_from_gguf(byte_level | {"tokenizer.ggml.pre": kind})
    ids = ours.encode(text, add_special_tokens=False).ids
    assert ids == reference(kind, byte_level).encode(text, add_special_tokens=False).ids
    if kind != "qwen2":  # which composes characters
        assert ours.decode(ids) == text


def test_the_ways_of_splitting_differ(byte_level: dict[str, Any]) -> None:
    """Else the test above would prove nothing."""
    kinds = ("gpt-2", "smollm", "llama-bpe", "qwen2")
    tokenizers = [tokenizer_from_gguf(byte_level | {"tokenizer.ggml.pre": kind}) for kind in kinds]
    encoded = {tuple(tokenizer.encode(" ".join(TEXTS), add_special_tokens=False).ids) for tokenizer in tokenizers}
    assert len(encoded) == len(kinds)


def test_a_llama_3_word_that_is_a_token_needs_no_merges(byte_level: dict[str, Any]) -> None:
    tokens = [*byte_level["tokenizer.ggml.tokens"], "zqxj"]
    types = [*byte_level["tokenizer.ggml.token_type"], 1]
    metadata = byte_level | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    for kind, is_whole in (("llama-bpe", True), ("qwen2", False)):
        ids = tokenizer_from_gguf(metadata | {"tokenizer.ggml.pre": kind}).encode("zqxj").ids
        assert (ids[-1] == len(tokens) - 1) == is_whole


@pytest.mark.parametrize(
    ("kind", "flag", "begins"),
    [("llama-bpe", None, True), ("llama-bpe", False, False), ("qwen2", None, False), ("qwen2", True, True)],
)
def test_text_begins_with_the_token_for_that_if_the_file_or_the_kind_says_so(
    kind: str, flag: bool | None, begins: bool, byte_level: dict[str, Any]
) -> None:
    said = {} if flag is None else {"tokenizer.ggml.add_bos_token": flag}
    tokenizer = tokenizer_from_gguf(byte_level | said | {"tokenizer.ggml.pre": kind})
    assert (tokenizer.encode("The").ids[0] == 0) == begins
    assert tokenizer.encode("The", add_special_tokens=False).ids[0] != 0


def test_control_tokens_are_special_and_tokens_of_the_user_are_not(byte_level: dict[str, Any]) -> None:
    tokens = [*byte_level["tokenizer.ggml.tokens"], "<think>"]
    types = [*byte_level["tokenizer.ggml.token_type"], 4]
    metadata = byte_level | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    tokenizer = tokenizer_from_gguf(metadata | {"tokenizer.ggml.pre": "qwen2"})
    assert tokenizer.encode("<eos><think>").ids == [1, len(tokens) - 1]
    assert tokenizer.decode([1, len(tokens) - 1]) == "<think>"


@pytest.fixture(scope="module")
def sentencepiece() -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "sentencepiece.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def scored(sentencepiece: dict[str, Any]) -> dict[str, Any]:
    """Metadata of that vocabulary."""
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": sentencepiece["tokens"],
        "tokenizer.ggml.scores": [float(score) for score in sentencepiece["scores"]],
        "tokenizer.ggml.token_type": sentencepiece["types"],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def test_scores_merge_text_as_sentencepiece_does(sentencepiece: dict[str, Any], scored: dict[str, Any]) -> None:
    tokenizer = tokenizer_from_gguf(scored)
    for text, ids in sentencepiece["cases"]:
        assert tokenizer.encode(text).ids == [1, *ids], text
        assert tokenizer.decode([1, *ids]) == text.replace("▁", " ")


def test_a_file_may_say_that_no_space_comes_first(scored: dict[str, Any]) -> None:
    tokenizer = tokenizer_from_gguf(scored | {"tokenizer.ggml.add_space_prefix": False})
    tokens = tokenizer.encode("The capital").tokens
    assert "".join(tokens) == "<s>The▁capital"
    assert tokenizer.decode(tokenizer.encode(" The").ids) == " The"


def test_the_configuration_names_special_tokens(scored: dict[str, Any]) -> None:
    metadata = scored | {"general.architecture": "llama", "llama.context_length": 512}
    config = tokenizer_config_from_gguf(metadata)
    assert (config["bos_token"], config["eos_token"], config["unk_token"]) == ("<s>", "</s>", "<unk>")
    assert config["model_max_length"] == 512
    assert "pad_token" not in config
    assert "chat_template" not in config


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"model": "bert"}, "kind 'bert' is not supported"),
        ({"model": None}, "kind None"),
        ({"pre": "tekken"}, "'tekken' (supported: gpt-2, smollm, llama-bpe, qwen2)"),
        ({"pre": None}, "None (supported"),
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": ["a", 5]}, "tokens is missing or of a wrong type"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "a token twice"),
        ({"token_type": [1]}, "one entry for each token"),
        ({"merges": ["T h", "no-such-token T"]}, "damaged"),
        ({"merges": ["Th"]}, "damaged"),
        ({"bos_token_id": 10**6}, "bos_token_id names no token"),
        ({"bos_token_id": "0"}, "bos_token_id names no token"),
    ],
)
def test_a_byte_level_tokenizer_that_is_not_known_or_not_whole_is_refused(
    entries: dict[str, Any], named: str, byte_level: dict[str, Any]
) -> None:
    changed = {f"tokenizer.ggml.{name}": value for name, value in entries.items()}
    with pytest.raises(ConfigurationError) as raised:
        tokenizer_from_gguf(byte_level | {"tokenizer.ggml.pre": "qwen2"} | changed)
    assert named in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"scores": None}, "scores is missing"),
        ({"scores": [0.0] * 460}, "same score"),
        ({"remove_extra_whitespaces": True}, "rewrites text"),
        ({"tokens": [f"<{i}>" for i in range(460)]}, "lacks bytes"),
    ],
)
def test_a_scored_tokenizer_that_could_only_be_guessed_is_refused(
    entries: dict[str, Any], named: str, scored: dict[str, Any]
) -> None:
    with pytest.raises(ConfigurationError, match=named):
        tokenizer_from_gguf(scored | {f"tokenizer.ggml.{name}": value for name, value in entries.items()})
