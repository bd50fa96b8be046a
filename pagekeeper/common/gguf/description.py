"""The files that a model directory would hold beside its weights, from the metadata of a GGUF file."""

import json
from typing import Any

from pagekeeper.common.gguf.config import config_from_gguf
from pagekeeper.common.gguf.header import GgufHeader
from pagekeeper.common.gguf.tokenizer import tokenizer_config_from_gguf, tokenizer_from_gguf

_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def describe_model(header: GgufHeader) -> dict[str, str]:
    """The text of each file by its name; chat_template.jinja only if there is a template.

    Raises:
        ConfigurationError: the model or its tokenizer is of a kind that is not supported.
    """
    config = config_from_gguf(header)
    tokenizer_config = tokenizer_config_from_gguf(header.metadata)
    files = {
        "config.json": _to_json(config),
        "generation_config.json": _to_json({name: config[name] for name in _SPECIAL_IDS}),
        "tokenizer_config.json": _to_json(tokenizer_config),
        "tokenizer.json": tokenizer_from_gguf(header.metadata).to_str(),
    }
    if "chat_template" in tokenizer_config:
        files["chat_template.jinja"] = str(tokenizer_config["chat_template"])
    return files


def _to_json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
