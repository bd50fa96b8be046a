"""Which files make up a model: a Hugging Face directory with safetensors or a GGUF file in it, or a GGUF file alone."""

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_runner.model.config import ModelConfig, parse_config
from model_runner.model.weights.gguf_file import GgufFile
from model_runner.model.weights.safetensors_file import SafetensorsFile
from model_runner.model.weights.source import WeightFile
from pagekeeper.common.errors import ConfigurationError
from pagekeeper.common.gguf.config import config_from_gguf
from pagekeeper.common.gguf.header import read_header

_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"[^/\0]+\.safetensors")


@dataclass(frozen=True)
class ModelFiles:
    """A model's configuration and its opened weight files."""

    config: ModelConfig
    weights: list[WeightFile]
    weight_paths: list[Path]
    """Sorted by name."""
    tensor_types: Counter[str]
    """How many tensors are stored in which type, by the format's own name for it."""


def open_model(path: Path) -> ModelFiles:
    """Open the model at `path`; headers are read and checked, weights are not read.

    Raises:
        ConfigurationError: there is no model, or it is one that is not supported.
    """
    if not path.exists():
        raise ConfigurationError(f"model: {path} does not exist")
    if path.is_file():
        return _open_gguf(path, None)
    shards = _shards(path)
    if shards:
        config = _read_config(path)
        files = [SafetensorsFile(shard) for shard in shards]
        types = Counter(dtype for file in files for dtype in file.dtypes.values())
        return ModelFiles(config, list(files), shards, types)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) != 1:
        found = f"{len(ggufs)} GGUF files" if ggufs else "neither .safetensors nor .gguf files"
        raise ConfigurationError(f"model: {path} holds {found}; name one model")
    return _open_gguf(ggufs[0], _read_config(path) if (path / "config.json").exists() else None)


def _open_gguf(path: Path, config: ModelConfig | None) -> ModelFiles:
    header = read_header(path)
    config = config or parse_config(config_from_gguf(header))
    types = Counter(tensor.type.name for tensor in header.tensors)
    return ModelFiles(config, [GgufFile(path, header, config.num_heads, config.num_kv_heads)], [path], types)


def _read_config(directory: Path) -> ModelConfig:
    generation = directory / "generation_config.json"
    return parse_config(_read_json(directory / "config.json"), _read_json(generation) if generation.exists() else None)


def _shards(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if not index.exists():
        return sorted(directory.glob("*.safetensors"))
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(_SHARD.fullmatch(str(name)) for name in weight_map.values()):
        raise ConfigurationError(f"model: {_INDEX} must map tensors to files of the same directory")
    shards = sorted({directory / str(name) for name in weight_map.values()})
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise ConfigurationError(f"model: {_INDEX} names {missing[0]}, which is not there")
    return shards


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"model: cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"model: {path} must hold a JSON object")
    return content
