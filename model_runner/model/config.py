"""What shape of decoder a model is, read from a Hugging Face config.json."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pagekeeper.common.errors import ConfigurationError

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Class names of config.json's `architectures`, and the `model_type` each stands for."""

# A file's word is bounded before anything is allocated by it.
_MOST = 2**31 - 1
_MOST_LAYERS = 1024
_MOST_HEAD_DIM = 1024
T = TypeVar("T")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding; `factor` and what follows it belong to the scaled variants."""

    theta: float
    variant: str = "default"
    """"default", "linear" (positions divided by factor) or "llama3" (low frequencies divided by factor)."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


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

    def digest(self) -> bytes:
        """SHA-256 of everything that shapes a token's K and V; what ends an answer does not."""
        fields = dataclasses.asdict(self)
        del fields["eos_token_ids"]
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).digest()


def parse_config(fields: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Read the content of a config.json, and of the generation_config.json next to it for more end tokens.

    Raises:
        ConfigurationError: an architecture or option that is not supported, a field that is missing or wrong.
    """
    architecture = _architecture(fields)
    _refuse_unsupported(fields)
    qwen2 = architecture == "qwen2"
    hidden_size = _positive(fields, "hidden_size")
    num_heads = _positive(fields, "num_attention_heads")
    num_kv_heads = _positive(fields, "num_key_value_heads", num_heads)
    num_layers = _positive(fields, "num_hidden_layers", most=_MOST_LAYERS)
    if num_heads % num_kv_heads:
        raise ConfigurationError(f"model: {num_heads} attention heads do not divide among {num_kv_heads} KV heads")
    head_dim = _positive(fields, "head_dim", hidden_size // num_heads, _MOST_HEAD_DIM)
    if head_dim % 2:
        raise ConfigurationError(f"model: head_dim must be even, not {head_dim}")
    attention_bias = architecture != "mistral" and _field(fields, "attention_bias", bool, False)
    return ModelConfig(
        architecture=architecture,
        vocab_size=_positive(fields, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(fields, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_epsilon=_field(fields, "rms_norm_eps", float, 1e-6),
        rope=_rope(fields),
        qkv_bias=qwen2 or attention_bias,
        output_bias=attention_bias and not qwen2,
        mlp_bias=architecture == "llama" and _field(fields, "mlp_bias", bool, False),
        qk_norm=architecture == "qwen3",
        tied_head=_field(fields, "tie_word_embeddings", bool, False),
        sliding_windows=_sliding_windows(architecture, fields, num_layers),
        max_position_embeddings=_positive(fields, "max_position_embeddings"),
        eos_token_ids=_token_ids(fields, generation or {}),
    )


def _architecture(fields: Mapping[str, Any]) -> str:
    listed: list[Any] = _field(fields, "architectures", list, [])
    names = [str(name) for name in listed]
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    model_type = str(fields.get("model_type"))
    if not names and model_type in ARCHITECTURES.values():
        return model_type
    found = ", ".join(names) or model_type
    raise ConfigurationError(f"model: architecture {found} is not supported; supported: {', '.join(ARCHITECTURES)}")


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    activation = fields.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigurationError(f"model: hidden_act {activation!r} is not supported, only 'silu'")
    if fields.get("quantization_config"):
        raise ConfigurationError("model: quantization_config is not supported; use unquantised weights or GGUF")


def _rope(fields: Mapping[str, Any]) -> RopeConfig:
    # transformers 5 writes everything into rope_parameters, older versions into rope_theta and rope_scaling.
    rope: Mapping[str, Any] = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ConfigurationError("model: rope_scaling must be an object")
    if any(source.get("partial_rotary_factor", 1.0) != 1.0 for source in (fields, rope)):
        raise ConfigurationError("model: partial_rotary_factor is not supported")
    variant = rope.get("rope_type", rope.get("type", "default"))
    theta = _field(rope if "rope_theta" in rope else fields, "rope_theta", float, 10000.0)
    if variant == "default":
        return RopeConfig(theta)
    if variant == "linear":
        return RopeConfig(theta, variant, _field(rope, "factor", float))
    if variant == "llama3":
        return RopeConfig(
            theta,
            variant,
            _field(rope, "factor", float),
            _field(rope, "low_freq_factor", float),
            _field(rope, "high_freq_factor", float),
            _positive(rope, "original_max_position_embeddings"),
        )
    raise ConfigurationError(f"model: rope scaling {variant!r} is not supported; supported: default, linear, llama3")


def _sliding_windows(architecture: str, fields: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    window = None if fields.get("sliding_window") is None else _positive(fields, "sliding_window")
    if architecture == "mistral":
        return (window,) * num_layers
    if architecture == "llama" or window is None or not fields.get("use_sliding_window"):
        return (None,) * num_layers
    first = _field(fields, "max_window_layers", int, num_layers)
    default = ["full_attention" if i < first else "sliding_attention" for i in range(num_layers)]
    types = _field(fields, "layer_types", list, default)
    if len(types) != num_layers or any(kind not in ("full_attention", "sliding_attention") for kind in types):
        raise ConfigurationError("model: layer_types must name full_attention or sliding_attention for each layer")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _token_ids(*sources: Mapping[str, Any]) -> tuple[int, ...]:
    ids: list[int] = []
    for fields in sources:
        value = fields.get("eos_token_id")
        values = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(v) is not int or v < 0 for v in values):
            raise ConfigurationError(f"model: eos_token_id must be a token id or a list of them, not {value!r}")
        ids += values
    return tuple(dict.fromkeys(ids))


def _positive(fields: Mapping[str, Any], name: str, default: int | None = None, most: int = _MOST) -> int:
    value = _field(fields, name, int, default)
    if not 1 <= value <= most:
        raise ConfigurationError(f"model: {name} must be from 1 to {most}, not {value}")
    return value


def _field(fields: Mapping[str, Any], name: str, kind: Callable[..., T], default: T | None = None) -> T:
    value = fields.get(name)
    if value is None:
        if default is None:
            raise ConfigurationError(f"model: {name} is missing")
        return default
    number = kind is float and type(value) is int
    if not number and type(value) is not kind:
        raise ConfigurationError(f"model: {name} must be of type {kind.__name__}, not {value!r}")
    return kind(value)
