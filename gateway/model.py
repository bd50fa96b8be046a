"""What the gateway needs of a model: names, text, and what a request does not say."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.sampling import SamplingDefaults
from gateway.text.chat_template import ChatTemplate
from gateway.text.tokenizer import TextTokenizer
from pagekeeper.common.errors import ConfigurationError, InvalidRequestError
from pagekeeper.common.gguf.description import describe_model
from pagekeeper.common.gguf.header import read_header

_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


@dataclass(frozen=True)
class ServedModel:
    """The one model that is served.

    Attributes:
        name: as clients name it.
        tokenizer: its text.
        defaults: sampling parameters of a request that is silent about them.
        end_token_ids: tokens that end an answer.
    """

    name: str
    tokenizer: TextTokenizer
    defaults: SamplingDefaults
    end_token_ids: frozenset[int]


def load_model(path: Path, name: str = "") -> ServedModel:
    """Read a model's text files; its weights are not touched.

    Args:
        path: a Hugging Face directory, of which tokenizer.json, config.json, generation_config.json,
            tokenizer_config.json and chat_template.jinja are read where they exist. Or a GGUF file, whose metadata
            stands for them; also in a directory without a tokenizer.json.
        name: default: the name of `path`.

    Raises:
        ConfigurationError: there is no such model, or its tokenizer or the content of one of its files is missing,
            wrong or not supported.
    """
    files = _read_files(path)
    if "tokenizer.json" not in files:
        raise ConfigurationError(f"model: {path} holds no tokenizer.json")
    config = _read_json(files, path / "config.json")
    generation_config = _read_json(files, path / "generation_config.json")
    tokenizer_config = _read_json(files, path / "tokenizer_config.json")
    template = _chat_template(files, tokenizer_config)
    try:
        tokenizer = TextTokenizer(files["tokenizer.json"], template)
    except Exception as error:  # the tokenizers library raises nothing more specific
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"model: {path / 'tokenizer.json'} cannot be read: {reason}") from error
    return ServedModel(
        name=name or path.resolve().name,
        tokenizer=tokenizer,
        defaults=_sampling_defaults(generation_config, path),
        end_token_ids=_end_token_ids(config, generation_config, tokenizer_config, tokenizer),
    )


def _read_files(path: Path) -> dict[str, str]:
    """The text of each file by its name."""
    if not path.exists():
        raise ConfigurationError(f"model: there is no {path}")
    if path.is_file():
        return describe_model(read_header(path))
    try:
        files = {file: (path / file).read_text("utf-8") for file in _FILES if (path / file).is_file()}
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"model: {path} cannot be read: {error}") from error
    ggufs = [] if "tokenizer.json" in files else list(path.glob("*.gguf"))
    return describe_model(read_header(ggufs[0])) | files if len(ggufs) == 1 else files


def _read_json(files: dict[str, str], path: Path) -> dict[str, Any]:
    """The object in the file that `path` names, empty if there is no such file."""
    try:
        content = json.loads(files.get(path.name, "{}"))
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"model: {path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"model: {path} does not hold a JSON object")
    return content


def _chat_template(files: dict[str, str], tokenizer_config: dict[str, Any]) -> ChatTemplate | None:
    """The template in its own file, as newer directories have it, or the one in tokenizer_config.json."""
    source = files.get("chat_template.jinja", tokenizer_config.get("chat_template"))
    if isinstance(source, list):  # several, each with a name
        source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
    if source is None:
        return None
    special_tokens = {key: _token_text(value) for key, value in tokenizer_config.items() if key.endswith("_token")}
    return ChatTemplate(source, {key: text for key, text in special_tokens.items() if text is not None})


def _token_text(value: object) -> str | None:
    """A special token of tokenizer_config.json: its text, or an object that holds it."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _sampling_defaults(generation_config: dict[str, Any], path: Path) -> SamplingDefaults:
    names = {
        "temperature": "temperature",
        "top_p": "top_p",
        "top_k": "top_k",
        "min_p": "min_p",
        "typical_p": "typical_p",
        "repetition_penalty": "repetition_penalty",
        "max_tokens": "max_new_tokens",
    }
    given = {
        ours: generation_config[theirs] for ours, theirs in names.items() if generation_config.get(theirs) is not None
    }
    try:
        return SamplingDefaults(**given)
    except (InvalidRequestError, OverflowError) as error:
        raise ConfigurationError(f"model: {path / 'generation_config.json'}: {error}") from error


def _end_token_ids(
    config: dict[str, Any],
    generation_config: dict[str, Any],
    tokenizer_config: dict[str, Any],
    tokenizer: TextTokenizer,
) -> frozenset[int]:
    """Those of generation_config.json, else of config.json; the tokenizer's own end-of-sequence token always."""
    listed = generation_config.get("eos_token_id", config.get("eos_token_id"))
    ids = [*listed] if isinstance(listed, list) else [listed]
    ids.append(tokenizer.token_id(_token_text(tokenizer_config.get("eos_token")) or ""))
    given = [token_id for token_id in ids if token_id is not None]
    vocab_size = config.get("vocab_size")
    most = max(tokenizer.vocab_size, vocab_size if isinstance(vocab_size, int) else 0)
    for token_id in given:
        if type(token_id) is not int or not 0 <= token_id < most:
            raise ConfigurationError(f"model: eos_token_id: {token_id!r} is not a token id; they are 0 to {most - 1}")
    return frozenset(given)
