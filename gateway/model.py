"""What the gateway needs of a model directory: names, text, and what a request does not say."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.text.chat_template import ChatTemplate
from gateway.text.tokenizer import TextTokenizer
from gateway.validation import SamplingDefaults
from pagekeeper.common.errors import ConfigurationError, InvalidRequestError


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
    """Read a Hugging Face model directory; its weights are not touched.

    Args:
        path: the directory, which holds tokenizer.json; config.json, generation_config.json, tokenizer_config.json
            and chat_template.jinja are read where they exist. Or a file of weights in such a directory.
        name: default: the name of `path`.

    Raises:
        ConfigurationError: the directory, its tokenizer, or one of its files' content is missing or wrong.
    """
    if not path.exists():
        raise ConfigurationError(f"model: there is no {path}")
    directory = path if path.is_dir() else path.parent
    definition = directory / "tokenizer.json"
    if not definition.is_file():
        raise ConfigurationError(f"model: {directory} holds no tokenizer.json")
    config = _read_json(directory / "config.json")
    generation_config = _read_json(directory / "generation_config.json")
    tokenizer_config = _read_json(directory / "tokenizer_config.json")
    template = _chat_template(directory, tokenizer_config)
    try:
        tokenizer = TextTokenizer(definition.read_text("utf-8"), template)
    except Exception as error:  # the tokenizers library raises nothing more specific
        raise ConfigurationError(f"model: {definition} cannot be read: {error}") from error
    return ServedModel(
        name=name or path.resolve().name,
        tokenizer=tokenizer,
        defaults=_sampling_defaults(generation_config, directory),
        end_token_ids=_end_token_ids(config, generation_config, tokenizer_config, tokenizer),
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"model: {path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"model: {path} does not hold a JSON object")
    return content


def _chat_template(directory: Path, tokenizer_config: dict[str, Any]) -> ChatTemplate | None:
    """The template in its own file, as newer directories have it, or the one in tokenizer_config.json."""
    file = directory / "chat_template.jinja"
    source = file.read_text("utf-8") if file.is_file() else tokenizer_config.get("chat_template")
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


def _sampling_defaults(generation_config: dict[str, Any], directory: Path) -> SamplingDefaults:
    names = {
        "temperature": "temperature",
        "top_p": "top_p",
        "top_k": "top_k",
        "min_p": "min_p",
        "max_tokens": "max_new_tokens",
    }
    given = {
        ours: generation_config[theirs] for ours, theirs in names.items() if generation_config.get(theirs) is not None
    }
    try:
        return SamplingDefaults(**given)
    except (InvalidRequestError, TypeError) as error:
        raise ConfigurationError(f"model: {directory / 'generation_config.json'}: {error}") from error


def _end_token_ids(
    config: dict[str, Any],
    generation_config: dict[str, Any],
    tokenizer_config: dict[str, Any],
    tokenizer: TextTokenizer,
) -> frozenset[int]:
    """Those of generation_config.json, else of config.json; the tokenizer's own end-of-sequence token always."""
    listed = generation_config.get("eos_token_id", config.get("eos_token_id"))
    ids = set(listed) if isinstance(listed, list) else {listed}
    ids.add(tokenizer.token_id(_token_text(tokenizer_config.get("eos_token")) or ""))
    return frozenset(token_id for token_id in ids if isinstance(token_id, int))
