"""From a path to a decoder that can run."""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels import reference
from kernels.interface import Kernels
from kernels.kv_layout import KvLayout
from model_runner.model.config import ModelConfig
from model_runner.model.decoder import Decoder
from model_runner.model.files import ModelFiles, open_model
from model_runner.model.weights.names import HEAD
from model_runner.model.weights.source import WeightSource


@dataclass(frozen=True)
class LoadedModel:
    """A decoder and what identifies it."""

    decoder: Decoder
    config: ModelConfig
    weights_digest: bytes
    """SHA-256 of the weight files' content."""
    config_digest: bytes
    """SHA-256 of every number that shapes a token's K and V."""
    dtype: torch.dtype
    """Of weights, activations and KV."""
    num_parameters: int

    def kv_layout(self, block_size: int) -> KvLayout:
        """The shape of a block of `block_size` tokens for this model.

        Raises:
            ValueError: `block_size` is not a power of two in 8..128.
        """
        config = self.config
        dtype = str(self.dtype).removeprefix("torch.")
        return KvLayout(config.num_layers, config.num_kv_heads, block_size, config.head_dim, dtype)


def load_decoder(path: Path, kernels: Kernels, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """Load the model at `path`, a Hugging Face directory or a GGUF file.

    Raises:
        ConfigurationError: there is no model, it is not supported, or its files are damaged; one line.
    """
    files = open_model(path)
    # Hashing lets go of the interpreter lock, so it costs next to nothing beside the conversion of the weights.
    with ThreadPoolExecutor(max_workers=1) as executor:
        digest = executor.submit(_digest, files.weight_paths)
        source = WeightSource(files.weights, dtype)
        decoder = Decoder(files.config, source, kernels)
        source.finish()
        return LoadedModel(decoder, files.config, digest.result(), files.config.digest(), dtype, source.num_parameters)


def check_weights(files: ModelFiles) -> None:
    """Check that every tensor has its place and the right shape, without reading any.

    Raises:
        ConfigurationError: a tensor is missing, has a wrong shape, or there is no place for it.
    """
    source = WeightSource([_ShapesOnly(files)], torch.float32)
    Decoder(files.config, source, reference)
    source.finish()


class _ShapesOnly:
    """Tensors with shapes and no values, which the decoder is built from as from real ones."""

    def __init__(self, files: ModelFiles) -> None:
        self._shapes = {name: shape for file in files.weights for name, shape in file.shapes().items()}
        if files.config.tied_head:
            self._shapes.pop(HEAD, None)  # a copy of the embedding, whose values there are none to compare

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str) -> torch.Tensor:
        return torch.empty(self._shapes[name], device="meta")


def _digest(paths: Sequence[Path]) -> bytes:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.stat().st_size.to_bytes(8, "little"))
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.digest()
