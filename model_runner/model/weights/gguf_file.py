"""Weights in the GGUF format, under Hugging Face's names and in Hugging Face's row order."""

import re
from pathlib import Path

import numpy as np
import torch

from model_runner.model.weights.names import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    ROPE_DIVISORS,
    ROPE_DIVISORS_LONG,
    ROPE_DIVISORS_SHORT,
)
from model_runner.model.weights.quantization import widen
from pagekeeper.common.errors import ConfigurationError
from pagekeeper.common.gguf.header import GgufHeader, GgufTensor

_NAMES = {
    "token_embd.weight": EMBEDDING,
    "output_norm.weight": FINAL_NORM,
    "output.weight": HEAD,
    "rope_freqs.weight": ROPE_DIVISORS,
    "rope_factors_short.weight": ROPE_DIVISORS_SHORT,
    "rope_factors_long.weight": ROPE_DIVISORS_LONG,
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GgufFile:
    """One GGUF file whose header was read and checked.

    Args:
        path: the file.
        header: its header.
        num_heads: of the model's queries.
        num_kv_heads: of its keys and values.

    Raises:
        ConfigurationError: a tensor is there twice, or has a name that no supported architecture uses.
    """

    def __init__(self, path: Path, header: GgufHeader, num_heads: int, num_kv_heads: int) -> None:
        # Pages are read when a tensor is; nothing is written to them.
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r")
        self._tensors: dict[str, GgufTensor] = {}
        for tensor in header.tensors:
            name = _translate(tensor.name)
            if name in self._tensors:
                raise ConfigurationError(f"weights: tensor {tensor.name} is there twice")
            self._tensors[name] = tensor
        self._interleaved_heads: dict[str, int] = {}
        if header.metadata.get("general.architecture") == "llama":
            # Only this architecture stores rotary pairs side by side instead of half a head apart.
            self._interleaved_heads = {"q_proj": num_heads, "k_proj": num_kv_heads}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        """The tensor's values in a float dtype, as exact as the file has them."""
        values = self._widen(self._tensors[name])
        num_heads = self._interleaved_heads.get(name.split(".")[-2])
        return values if num_heads is None else _separate_pairs(values, num_heads)

    def _widen(self, tensor: GgufTensor) -> torch.Tensor:
        raw = np.array(self._bytes[tensor.offset : tensor.offset + tensor.num_bytes])
        blocks = torch.from_numpy(raw).view(-1, tensor.type.block_bytes)
        return widen(tensor.type, blocks).view(tensor.shape)


def _translate(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES:
        raise ConfigurationError(f"weights: no place for tensor {name}")
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"


def _separate_pairs(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """From rows (0, h), (1, h + 1)… of each head, h being half of it, to rows 0, 1, … h, h + 1…; biases likewise."""
    pairs = rows.view(num_heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
