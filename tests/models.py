"""Tiny random models, written without transformers in a few milliseconds, and the same weights as GGUF files."""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
END, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_SENTENCES = [
    "The quick brown fox jumps over the lazy dog while the keeper turns another page of the book.",
    "What is the capital of France? The capital of France is Paris, and it lies on the river Seine.",
    "A block is written by one runner until it is full; then it is sealed, shared and found by its content.",
    "Größe, naïve, café, 東京, 🙂: text is bytes, and half a character is never shown to anyone.",
]


def write_tiny_model(path: Path, architecture: str = "llama", *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random model directory: config, weights, tokenizer with a chat template, generation defaults.

    Args:
        path: directory to create.
        architecture: "llama", "mistral", "qwen2" or "qwen3".
        seed: of the weights.
        overrides: fields of config.json, such as `num_hidden_layers=1`.
    """
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer()
    config = tiny_config(architecture, vocab_size=tokenizer.get_vocab_size(), **overrides)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": config["eos_token_id"]}))
    save_file(tiny_weights(config, seed), path / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(path / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": START_OF_TURN,
        "eos_token": END_OF_TURN,
        "unk_token": END,
        "pad_token": END,
        "model_max_length": config["max_position_embeddings"],
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2))
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return path


def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE over any text, with the three special tokens at ids 0, 1 and 2."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in (END, START_OF_TURN, END_OF_TURN)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=384, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    return tokenizer


def tiny_config(architecture: str, **overrides: Any) -> dict[str, Any]:
    """Content of a config.json: two layers, four heads in two groups, everything else small."""
    config: dict[str, Any] = {
        "architectures": [CLASSES[architecture]],
        "model_type": architecture,
        "vocab_size": 384,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": architecture == "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "sliding_window": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "dtype": "float32",
    }
    return config | overrides


def tiny_weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Random float32 weights of that shape, large enough that logits differ clearly between tokens."""
    generator = torch.Generator().manual_seed(seed)
    hidden, size, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    architecture = config["model_type"]
    output_bias = architecture in ("llama", "qwen3") and config["attention_bias"]
    qkv_bias = output_bias or architecture == "qwen2"
    weights: dict[str, torch.Tensor] = {}

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    def linear(name: str, out_features: int, in_features: int, has_bias: bool) -> None:
        weights[f"{name}.weight"] = normal(out_features, in_features, scale=1.5 * in_features**-0.5)
        if has_bias:
            weights[f"{name}.bias"] = normal(out_features, scale=0.1)

    def norm(name: str, width: int) -> None:
        weights[f"{name}.weight"] = 1 + normal(width, scale=0.1)

    weights["model.embed_tokens.weight"] = normal(config["vocab_size"], hidden, scale=1.0)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        norm(f"{prefix}.input_layernorm", hidden)
        linear(f"{prefix}.self_attn.q_proj", q_size, hidden, qkv_bias)
        linear(f"{prefix}.self_attn.k_proj", kv_size, hidden, qkv_bias)
        linear(f"{prefix}.self_attn.v_proj", kv_size, hidden, qkv_bias)
        linear(f"{prefix}.self_attn.o_proj", hidden, q_size, output_bias)
        if architecture == "qwen3":
            norm(f"{prefix}.self_attn.q_norm", head_dim)
            norm(f"{prefix}.self_attn.k_norm", head_dim)
        norm(f"{prefix}.post_attention_layernorm", hidden)
        mlp_bias = architecture == "llama" and config["mlp_bias"]
        linear(f"{prefix}.mlp.gate_proj", size, hidden, mlp_bias)
        linear(f"{prefix}.mlp.up_proj", size, hidden, mlp_bias)
        linear(f"{prefix}.mlp.down_proj", hidden, size, mlp_bias)
    norm("model.norm", hidden)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = normal(config["vocab_size"], hidden, scale=hidden**-0.5)
    return weights


def write_tiny_gguf(
    path: Path,
    directory: Path,
    kind: gguf.GGMLQuantizationType | None = None,
    tokenizer: Tokenizer | None = None,
    *,
    metadata: Mapping[str, str | int | float] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write the model in `directory` as a GGUF file, the way converters do.

    Args:
        path: the file to write.
        directory: a model written by `write_tiny_model`.
        kind: type of the matrices; vectors, and everything by default, are F32.
        tokenizer: to describe in the metadata.
        metadata: entries to add, under the architecture's name unless they begin with "/".
        tensors: to add, in F32.
    """
    config = json.loads((directory / "config.json").read_text())
    architecture = config["model_type"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_eos_token_id(config["eos_token_id"])
    add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
    for key, value in (metadata or {}).items():
        add[type(value)](key.removeprefix("/") if key.startswith("/") else f"{architecture}.{key}", value)
    if tokenizer is not None:
        _add_tokenizer(writer, tokenizer)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in load_file(directory / "model.safetensors").items():
        values = tensor.numpy()
        is_matrix = kind is not None and values.ndim > 1
        if is_matrix:
            values = _quantize(name, values, kind)
        part = name.split(".")[-2]
        if architecture == "llama" and part in heads:
            values = _interleave_pairs(values, heads[part])
        writer.add_tensor(_gguf_name(name), values, raw_dtype=kind if is_matrix else None)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def round_weights(directory: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Replace the matrices in `directory` by those of the file that `write_tiny_gguf` makes of it, widened."""
    weights = load_file(directory / "model.safetensors")
    for name, tensor in weights.items():
        if tensor.ndim > 1:
            raw = _quantize(name, tensor.numpy(), kind)
            weights[name] = torch.from_numpy(gguf.quants.dequantize(raw, kind).astype(np.float32))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


# Types that the package can read but not write: where a block has its scale, and the ratio of its offset to that.
_RANDOM_BLOCKS = {"Q4_K": (0, 7.5), "Q5_K": (0, 15.5), "Q6_K": (208, None)}


def _quantize(name: str, values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Rows as blocks of `kind`; for some types they are random, with about the same spread."""
    if kind.name not in _RANDOM_BLOCKS:
        return gguf.quants.quantize(values, kind)
    position, offset = _RANDOM_BLOCKS[kind.name]
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = values.shape
    blocks = np.random.default_rng(zlib.crc32(name.encode())).integers(
        0, 256, (rows * columns // block_values, block_bytes), dtype=np.uint8
    )

    def spread(scale: float) -> float:
        numbers = np.array([scale] if offset is None else [scale, scale * offset], dtype=np.float16).view(np.uint8)
        blocks[:, position : position + len(numbers)] = numbers
        return float(gguf.quants.dequantize(blocks, kind).std())

    spread(float(values.std()) / spread(1.0))
    return blocks.reshape(rows, -1)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    model = json.loads(tokenizer.to_str())["model"]
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    control = {END, START_OF_TURN, END_OF_TURN}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in control else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)


def _interleave_pairs(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Put rows i and i + head_dim / 2 of each head side by side, values or blocks of them."""
    halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def _gguf_name(name: str) -> str:
    fixed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in fixed:
        return fixed[name]
    _, _, layer, *part, suffix = name.split(".")
    return f"blk.{layer}.{_GGUF_LAYER_NAMES['.'.join(part)]}.{suffix}"
