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
from pagekeeper.common.errors import ConfigurationError

_HOST = torch.device("cpu")
_HALF_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_GIB = 1 << 30


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
    """Of weights and activations."""
    num_parameters: int

    @property
    def compute_dtype(self) -> str:
        """`dtype` by its name."""
        return str(self.dtype).removeprefix("torch.")

    def kv_layout(self, block_size: int, kv_dtype: str = "auto") -> KvLayout:
        """The shape of a block of `block_size` tokens for this model; "auto" keeps K and V as they are computed.

        Raises:
            ValueError: `block_size` is not a power of two in 8..128, or `kv_dtype` is unknown.
        """
        config = self.config
        dtype = self.compute_dtype if kv_dtype == "auto" else kv_dtype
        return KvLayout(config.num_layers, config.num_kv_heads, block_size, config.head_dim, dtype)


def load_decoder(
    path: Path, kernels: Kernels, dtype: torch.dtype | None = None, device: torch.device = _HOST
) -> LoadedModel:
    """Load the model at `path`, a Hugging Face directory or a GGUF file.

    Args:
        path: of the model.
        kernels: its operations, which arrange the weights.
        dtype: to compute in; None: float32 on a CPU, elsewhere the 16 bits that the model was made for.
        device: where the weights go, tensor by tensor.

    Raises:
        ConfigurationError: there is no model, it is not supported, its files are damaged, or the device's memory does
            not hold it; one line.
    """
    files = open_model(path)
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else _HALF_DTYPES[files.config.half_dtype]
    # Hashing lets go of the interpreter lock, so it costs next to nothing beside the conversion of the weights.
    with ThreadPoolExecutor(max_workers=1) as executor:
        digest = executor.submit(_digest, files.weight_paths)
        source = WeightSource(files.weights, dtype, device)
        if device.type == "cuda":
            check_fits(source.num_bytes_left, free=torch.cuda.mem_get_info(device)[0])
        decoder = Decoder(files.config, source, kernels)
        source.finish()
        return LoadedModel(decoder, files.config, digest.result(), files.config.digest(), dtype, source.num_parameters)


def check_fits(needed: int, free: int) -> None:
    """Check that weights of `needed` bytes go into `free` bytes of a device's memory.

    Raises:
        ConfigurationError: they do not.
    """
    if needed > free:
        raise ConfigurationError(
            f"device: the weights take {needed / _GIB:.1f} GiB and the GPU has {free / _GIB:.1f} GiB free; lower "
            "--pool-size or serve a smaller model"
        )


def check_weights(files: ModelFiles) -> None:
    """Check that every tensor has its place and the right shape, without reading any.

    Raises:
        ConfigurationError: a tensor is missing, has a wrong shape, or there is no place for it.
    """
    source = WeightSource([_ShapesOnly(files)], torch.float32, torch.device("meta"))
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
