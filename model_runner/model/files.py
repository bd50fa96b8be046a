"""Which files make up a model: a Hugging Face directory."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_runner.model.config import ModelConfig, parse_config
from model_runner.model.weights.safetensors_file import SafetensorsFile
from model_runner.model.weights.source import WeightFile
from pagekeeper.common.errors import ConfigurationError

_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class ModelFiles:
    """A model's configuration and its opened weight files."""

    config: ModelConfig
    weights: list[WeightFile]
    weight_paths: list[Path]
    """Sorted by name."""


def open_model(path: Path) -> ModelFiles:
    """Open the model at `path`; headers are read and checked, weights are not read.

    Raises:
        ConfigurationError: there is no model, or it is one that is not supported.
    """
    if not path.exists():
        raise ConfigurationError(f"model: {path} does not exist")
    config = parse_config(_read_json(path / "config.json"), _read_optional_json(path / "generation_config.json"))
    paths = _weight_paths(path)
    return ModelFiles(config, [SafetensorsFile(p) for p in paths], paths)


def _weight_paths(directory: Path) -> list[Path]:
    if (directory / _INDEX).exists():
        shards = _read_json(directory / _INDEX).get("weight_map")
        if not isinstance(shards, dict) or not all(Path(str(s)).name == s for s in shards.values()):
            raise ConfigurationError(f"model: {_INDEX} must map tensors to files of the same directory")
        return sorted({directory / str(s) for s in shards.values()})
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise ConfigurationError(f"model: {directory} holds no weights (.safetensors)")
    return paths


def _read_optional_json(path: Path) -> dict[str, Any]:
    return _read_json(path) if path.exists() else {}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"model: cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"model: {path} must hold a JSON object")
    return content
