"""From a GGUF file's metadata to the config.json that describes the same model."""

from collections.abc import Callable, Mapping
from typing import Any

from pagekeeper.common.errors import ConfigurationError
from pagekeeper.common.gguf.header import GgufHeader

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def config_from_gguf(header: GgufHeader) -> dict[str, Any]:
    """The fields of config.json, those that `parse_config` reads and those that other programs expect.

    Raises:
        ConfigurationError: the architecture, an option of it or the rope scaling is not supported.
    """
    metadata = header.metadata
    architecture = str(metadata.get("general.architecture"))
    if architecture not in _CLASSES:
        known = ", ".join(_CLASSES)
        raise ConfigurationError(f"model: GGUF architecture {architecture!r} is not supported; supported: {known}")

    def get(name: str, default: Any = None) -> Any:  # noqa: ANN401 - metadata values are of many types
        return metadata.get(f"{architecture}.{name}", default)

    if get("expert_count") or get("attention.sliding_window"):
        raise ConfigurationError("model: experts and sliding windows are not supported in GGUF files")
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    if "token_embd.weight" not in shapes:
        raise ConfigurationError("weights: tensor token_embd.weight is missing")
    num_heads, hidden_size = get("attention.head_count"), get("embedding_length")
    head_dim = get("attention.key_length")
    if head_dim is None and type(num_heads) is int and type(hidden_size) is int and num_heads > 0:
        head_dim = hidden_size // num_heads
    if get("rope.dimension_count", head_dim) != head_dim or get("attention.value_length", head_dim) != head_dim:
        raise ConfigurationError("model: partial rotary embedding and unequal K and V sizes are not supported")
    return {
        "architectures": [_CLASSES[architecture]],
        "model_type": architecture,
        "hidden_act": "silu",
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden_size,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(get),
        "max_position_embeddings": get("context_length"),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_output.bias" in shapes,
        "mlp_bias": "blk.0.ffn_down.bias" in shapes,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_token_ids(metadata),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }


def _end_token_ids(metadata: Mapping[str, Any]) -> Any:  # noqa: ANN401 - whatever the file says; checked when it is read
    """One id or several: what ends a text, a turn (eot) and a message to a tool (eom)."""
    found = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ids = [token_id for i, token_id in enumerate(found) if token_id is not None and token_id not in found[:i]]
    return ids if len(ids) > 1 else next(iter(ids), None)


def _rope_scaling(get: Callable[..., Any]) -> dict[str, Any] | None:
    """The `rope_scaling` of config.json. Its divisors for longrope, and those of llama3, are tensors of the file."""
    kind = get("rope.scaling.type", "linear")
    factor = get("rope.scaling.factor", get("rope.scale_linear", 1.0))
    trained = {"original_max_position_embeddings": get("rope.scaling.original_context_length")}
    if kind == "longrope":
        return {"rope_type": kind, **trained, "attention_factor": get("rope.scaling.attn_factor", 1.0)}
    neutral = {"attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_log_multiplier": 0.0}
    for name, value in neutral.items():
        if get(f"rope.scaling.{name}", value) != value:
            raise ConfigurationError(f"model: rope.scaling.{name} is not supported in GGUF files")
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    if kind == "yarn":
        betas = {name: get(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        return {"rope_type": kind, "factor": factor, **trained, **betas}
    return {"rope_type": kind, "factor": factor}  # an unknown kind is refused where config.json is read
