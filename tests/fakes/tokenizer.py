"""Tiny tokenizers and model directories without weights, written in milliseconds and without torch."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

END, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
END_ID, START_OF_TURN_ID, END_OF_TURN_ID = 0, 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SENTENCES = [
    "The quick brown fox jumps over the lazy dog. What is the capital of France? It is Paris, on the river Seine.",
    "Größe, naïve, café, 東京, 🙂: text is bytes, and half a character is never shown to anyone.",
]


def byte_level_tokenizer() -> Tokenizer:
    """BPE over bytes, as Llama 3, Qwen and SmolLM have it: any text, and tokens that are parts of characters."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in (END, START_OF_TURN, END_OF_TURN)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=384, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """BPE over characters with a token for each byte of the others, as Llama 2 and Mistral have it; adds <s>."""
    letters = "▁abcdefghijklmnopqrstuvwxyz.,?!"
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "th", "▁th", "▁the"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [("t", "h"), ("▁", "th"), ("▁th", "e")]
    tokenizer = Tokenizer(BPE(vocab, merges, unk_token=pieces[0], fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    return tokenizer


def write_model_directory(
    path: Path,
    tokenizer: Tokenizer | None = None,
    *,
    chat_template: str | None = CHAT_TEMPLATE,
    generation_config: dict[str, Any] | None = None,
    eos_token: str = END_OF_TURN,
) -> Path:
    """Write what a gateway reads of a model directory."""
    path.mkdir(parents=True, exist_ok=True)
    (tokenizer or byte_level_tokenizer()).save(str(path / "tokenizer.json"))
    tokenizer_config = {"eos_token": eos_token} | ({"chat_template": chat_template} if chat_template else {})
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    if generation_config is not None:
        (path / "generation_config.json").write_text(json.dumps(generation_config))
    return path
