"""Llama models of real shapes with random weights, written as fast as memory takes them.

A tensor is a window into one stream of normal numbers, scaled to its kind, so 16 GB need 32 MB of randomness. The
windows have different beginnings and the stream's length is odd, so no two rows of a matrix are alike.
"""

import json
import math
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from bench.gpu_check.scratch import scratch_folder
from bench.gpu_check.task import Setting

_MOST_NUMBERS = 1 << 23
_SHARDS = 8
_DTYPES = {"bfloat16": "BF16", "float32": "F32"}


@dataclass(frozen=True)
class ModelShape:
    """What config.json says of a Llama."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_head: bool
    dtype: str = "bfloat16"

    def tensors(self) -> dict[str, tuple[tuple[int, ...], float]]:
        """Shape and standard deviation of every tensor by name; norms, of one dimension, are around 1."""
        hidden, size = self.hidden_size, self.intermediate_size
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        tensors: dict[str, tuple[tuple[int, ...], float]] = {
            "model.embed_tokens.weight": ((self.vocab_size, hidden), 1.0),
            "model.norm.weight": ((hidden,), 0.1),
        }
        if not self.tied_head:
            tensors["lm_head.weight"] = ((self.vocab_size, hidden), hidden**-0.5)
        matrices = {
            "self_attn.q_proj": (q_size, hidden),
            "self_attn.k_proj": (kv_size, hidden),
            "self_attn.v_proj": (kv_size, hidden),
            "self_attn.o_proj": (hidden, q_size),
            "mlp.gate_proj": (size, hidden),
            "mlp.up_proj": (size, hidden),
            "mlp.down_proj": (hidden, size),
        }
        for layer in range(self.num_layers):
            for name, shape in matrices.items():
                tensors[f"model.layers.{layer}.{name}.weight"] = (shape, 1.5 * shape[1] ** -0.5)
            for name in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"model.layers.{layer}.{name}.weight"] = ((hidden,), 0.1)
        return tensors

    @property
    def weight_bytes(self) -> int:
        """Of all tensors together."""
        return sum(math.prod(shape) for shape, _ in self.tensors().values()) * self.item_bytes

    @property
    def bytes_read_a_step(self) -> int:
        """Weights that every decode step reads: not the embedding, of which it takes rows, unless it is the head."""
        embedding = 0 if self.tied_head else self.vocab_size * self.hidden_size * self.item_bytes
        return self.weight_bytes - embedding

    @property
    def kv_bytes_a_token(self) -> int:
        """K and V of one token in all layers, in the model's type."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.item_bytes

    @property
    def item_bytes(self) -> int:
        """Of one element."""
        return 2 if self.dtype == "bfloat16" else 4

    def config(self) -> dict[str, object]:
        """Content of config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": self.tied_head,
            "eos_token_id": 2,
            "dtype": self.dtype,
        }


LLAMA_8B = ModelShape("llama-8b", 32, 4096, 14336, 32, 8, 128, 128256, tied_head=False)
LLAMA_1B = ModelShape("llama-1b", 16, 2048, 8192, 32, 8, 64, 128256, tied_head=True)
TINY = ModelShape("tiny", 2, 64, 96, 4, 2, 64, 512, tied_head=True)


@contextmanager
def written(shape: ModelShape, setting: Setting) -> Iterator[Path]:
    """A directory with the model, alone in its parent; both are removed at the end.

    Raises:
        NotRunError: there is no room for it.
    """
    with scratch_folder(setting.seed, shape.weight_bytes) as folder:
        yield write(shape, folder / shape.name, setting.seed)


def write(shape: ModelShape, path: Path, seed: int) -> Path:
    """Write the model directory `path`; returns it."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(shape.config(), indent=1))
    _tokenizer(shape.vocab_size).save(str(path / "tokenizer.json"))
    generator = torch.Generator().manual_seed(seed)
    dtype: torch.dtype = getattr(torch, shape.dtype)
    normal = torch.randn(min(_MOST_NUMBERS, shape.weight_bytes // shape.item_bytes) | 1, generator=generator)
    streams: dict[tuple[bool, float], torch.Tensor] = {}
    for dimensions, deviation in shape.tensors().values():
        is_norm = len(dimensions) == 1
        streams.setdefault((is_norm, deviation), (normal * deviation + is_norm).to(dtype))
    names = list(shape.tensors())
    files = {path / f"model-{i}.safetensors": names[i::_SHARDS] for i in range(_SHARDS)}
    # What takes time is the kernel's making room for the pages, which threads do side by side.
    with ThreadPoolExecutor(_SHARDS) as threads:
        list(threads.map(lambda path: _write_shard(path, files[path], shape, streams), files))
    return path


def _write_shard(
    path: Path, names: list[str], shape: ModelShape, streams: dict[tuple[bool, float], torch.Tensor]
) -> None:
    """The safetensors format: length of the header, header, tensors in its order."""
    tensors = {name: tensor for name, tensor in shape.tensors().items() if name in names}
    header: dict[str, object] = {}
    end = 0
    for name, (dimensions, _) in tensors.items():
        start, end = end, end + math.prod(dimensions) * shape.item_bytes
        header[name] = {"dtype": _DTYPES[shape.dtype], "shape": list(dimensions), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, (dimensions, deviation) in tensors.items():
            stream = streams[len(dimensions) == 1, deviation]
            _write_window(file, stream, zlib.crc32(name.encode()) % len(stream), math.prod(dimensions))


def _write_window(file: IO[bytes], stream: torch.Tensor, start: int, count: int) -> None:
    """Write `count` elements of the endlessly repeated stream."""
    size = stream.element_size()
    data = memoryview(stream.view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy says so from Python 3.12 on
    while count:
        part = min(count, len(stream) - start)
        file.write(data[start * size : (start + part) * size])
        start, count = 0, count - part


def _tokenizer(vocab_size: int) -> Tokenizer:
    """Bytes, and beyond them a name for every id, so that whatever the model says is a text."""
    names = ["<|endoftext|>", "<|start|>", "<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"t{i}" for i in range(len(names), vocab_size)]
    tokenizer = Tokenizer(BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
