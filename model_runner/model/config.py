"""What shape of decoder a model is, read from a Hugging Face config.json."""

import dataclasses
import hashlib
import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model_runner.model.fields import read, read_count, read_number
from model_runner.model.rope import RopeConfig, parse_rope
from pagekeeper.common.errors import ConfigurationError

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Class names of config.json's `architectures`, and the `model_type` each stands for."""

_MOST_LAYERS = 1024
_MOST_HEAD_DIM = 1024
# What transformers takes for fields that the file leaves out.
_DEFAULT_WINDOW = 4096
_DEFAULT_WINDOW_LAYERS = 28


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder of the Llama family. Sizes count elements."""

    architecture: str
    """"llama", "mistral", "qwen2" or "qwen3"."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_epsilon: float
    rope: RopeConfig
    qkv_bias: bool
    output_bias: bool
    """Whether the attention's output projection has a bias."""
    mlp_bias: bool
    qk_norm: bool
    """Whether each head of Q and K is normalised before it is rotated."""
    tied_head: bool
    """Whether the embedding serves as output head."""
    sliding_windows: tuple[int | None, ...]
    """For each layer how many tokens back a token sees, itself included; None is all of them."""
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    """Tokens that end an answer; may be empty."""
    half_dtype: str
    """"bfloat16" or "float16": what the model was made for, where it computes in 16 bits."""

    def digest(self) -> bytes:
        """SHA-256 of everything that shapes a token's K and V, but for the dtype that is computed in."""
        fields = dataclasses.asdict(self)
        del fields["eos_token_ids"], fields["half_dtype"]
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).digest()


def parse_config(fields: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Read the content of a config.json, and of the generation_config.json next to it for more end tokens.

    Raises:
        ConfigurationError: an architecture or option that is not supported, a field that is missing or wrong.
    """
    architecture = _architecture(fields)
    _refuse_unsupported(fields)
    qwen2 = architecture == "qwen2"
    hidden_size = read_count(fields, "hidden_size")
    num_heads = read_count(fields, "num_attention_heads")
    num_kv_heads = read_count(fields, "num_key_value_heads", num_heads)
    num_layers = read_count(fields, "num_hidden_layers", most=_MOST_LAYERS)
    if num_heads % num_kv_heads:
        raise ConfigurationError(f"model: {num_heads} attention heads do not divide among {num_kv_heads} KV heads")
    head_dim = read_count(fields, "head_dim", hidden_size // num_heads, _MOST_HEAD_DIM)
    if head_dim % 2:
        raise ConfigurationError(f"model: head_dim must be even, not {head_dim}")
    max_positions = read_count(fields, "max_position_embeddings")
    attention_bias = architecture != "mistral" and read(fields, "attention_bias", bool, False)
    return ModelConfig(
        architecture=architecture,
        vocab_size=read_count(fields, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=read_count(fields, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_epsilon=read_number(fields, "rms_norm_eps", 1e-6),
        rope=parse_rope(fields, head_dim, max_positions),
        qkv_bias=qwen2 or attention_bias,
        output_bias=attention_bias and not qwen2,
        mlp_bias=architecture == "llama" and read(fields, "mlp_bias", bool, False),
        qk_norm=architecture == "qwen3",
        tied_head=read(fields, "tie_word_embeddings", bool, False),
        sliding_windows=_sliding_windows(architecture, fields, num_layers),
        max_position_embeddings=max_positions,
        eos_token_ids=_token_ids(fields, generation or {}),
        half_dtype="float16" if fields.get("dtype", fields.get("torch_dtype")) == "float16" else "bfloat16",
    )


def _architecture(fields: Mapping[str, Any]) -> str:
    listed: list[Any] = read(fields, "architectures", list, [])
    names = [str(name) for name in listed]
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    model_type = str(fields.get("model_type"))
    if not names and model_type in ARCHITECTURES.values():
        return model_type
    found = " ".join(" ".join(names or [model_type]).split())  # on one line
    raise ConfigurationError(f"model: architecture {found} is not supported; supported: {', '.join(ARCHITECTURES)}")


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    activation = fields.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigurationError(f"model: hidden_act {activation!r} is not supported, only 'silu'")
    if fields.get("quantization_config"):
        raise ConfigurationError("model: quantization_config is not supported; use unquantised weights or GGUF")


def _sliding_windows(architecture: str, fields: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    window = None
    if fields.get("sliding_window", _DEFAULT_WINDOW) is not None:
        window = read_count(fields, "sliding_window", _DEFAULT_WINDOW)
    if architecture == "mistral":
        return (window,) * num_layers
    if architecture == "llama" or window is None or not read(fields, "use_sliding_window", bool, False):
        return (None,) * num_layers
    first = read(fields, "max_window_layers", int, _DEFAULT_WINDOW_LAYERS)
    default = ["full_attention" if i < first else "sliding_attention" for i in range(num_layers)]
    types = read(fields, "layer_types", list, default)
    if len(types) != num_layers or any(kind not in ("full_attention", "sliding_attention") for kind in types):
        raise ConfigurationError("model: layer_types must name full_attention or sliding_attention for each layer")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _token_ids(*sources: Mapping[str, Any]) -> tuple[int, ...]:
    ids: list[int] = []
    for fields in sources:
        value = fields.get("eos_token_id")
        values = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(v) is not int or v < 0 for v in values):
            raise ConfigurationError(
                f"model: eos_token_id must be a token id or a list of them, not {reprlib.repr(value)}"
            )
        ids += values
    return tuple(dict.fromkeys(ids))
