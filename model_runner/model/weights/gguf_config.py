"""From a GGUF file's metadata to the config.json that describes the same model."""

from typing import Any

from model_runner.model.weights.gguf_header import GgufHeader
from pagekeeper.common.errors import ConfigurationError

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
        raise ConfigurationError(f"model: GGUF architecture {architecture} is not supported; supported: {known}")

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
        "rope_scaling": _rope_scaling(get("rope.scaling.type", "none"), get("rope.scaling.factor", 1.0)),
        "max_position_embeddings": get("context_length"),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_output.bias" in shapes,
        "mlp_bias": "blk.0.ffn_down.bias" in shapes,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }


def _rope_scaling(kind: str, factor: float) -> dict[str, Any] | None:
    if kind == "none":
        return None
    return {"rope_type": kind, "factor": factor}  # an unsupported kind is refused where config.json is read
