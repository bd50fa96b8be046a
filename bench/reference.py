"""The same weights in transformers, float32: what the right answer is, and how clear a choice was."""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

NEAR_TIE = 1e-3
"""Two logits closer than this may change places with the order of a summation."""


@dataclass(frozen=True)
class Parting:
    """Where an answer first leaves the reference's, and how far apart the reference's two best logits are there."""

    position: int
    gap: float

    @property
    def is_near_tie(self) -> bool:
        """The choice was not clear, so neither answer is wrong."""
        return self.gap < NEAR_TIE


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """For many small operations, in which two threads mostly wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


class Reference:
    """Loads the model when first used: half a minute from a GGUF file.

    Args:
        model: a model directory.
    """

    def __init__(self, model: Path) -> None:
        self._path = model

    @functools.cached_property
    def _model(self) -> Any:  # noqa: ANN401 - transformers has no type for "some causal model"
        from transformers import AutoModelForCausalLM

        gguf = next(self._path.glob("*.gguf"), None)
        options = {"gguf_file": gguf.name} if gguf else {}
        return AutoModelForCausalLM.from_pretrained(self._path, dtype=torch.float32, **options).eval()

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self._path / "tokenizer.json"))

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return int(self._model.config.vocab_size)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return list(self._tokenizer.encode(text).ids)

    def prepare(self) -> None:
        """Load the model now, so that it is not timed."""
        self._model  # noqa: B018 - a cached property

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """Greedy continuations of prompts of one length, past any end-of-sequence token."""
        with torch.inference_mode():
            out = self._model.generate(
                torch.tensor(prompts),
                attention_mask=torch.ones(len(prompts), len(prompts[0]), dtype=torch.int64),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
            )
        return [list(row) for row in out[:, len(prompts[0]) :].tolist()]

    def search(self, prompt: list[int], width: int, num_tokens: int) -> list[tuple[list[int], float]]:
        """The answers of a beam search and their scores, best first; without end-of-sequence tokens."""
        with torch.inference_mode(), _one_thread():
            out = self._model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=num_tokens,
                num_beams=width,
                num_return_sequences=width,
                do_sample=False,
                output_scores=True,
                return_dict_in_generate=True,
            )
        end = self._model.generation_config.eos_token_id
        ends = set(end if isinstance(end, list) else [end])
        answers = [list(takewhile(lambda t: t not in ends, row)) for row in out.sequences[:, len(prompt) :].tolist()]
        return list(zip(answers, out.sequences_scores.tolist(), strict=True))

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Logits after each of the tokens, [tokens, vocabulary]."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([token_ids])).logits[0]
        return torch.as_tensor(logits)

    def parting(self, prompt: list[int], answer: list[int]) -> Parting | None:
        """Where a greedy answer leaves the reference's; None if nowhere. Both go on past the end-of-sequence token."""
        logits = self.logits(prompt + answer)[len(prompt) - 1 : -1]
        differs = (logits.argmax(dim=-1) != torch.tensor(answer)).nonzero()
        if not len(differs):
            return None
        position = int(differs[0])
        first, second = logits[position].topk(2).values.tolist()
        return Parting(position, first - second)

    def gap_where_they_part(self, prompt: list[int], one: list[int], other: list[int]) -> Parting | None:
        """Where two answers to a prompt part, and how clear the choice was there; None if they are equal."""
        if one == other:
            return None
        position = next(
            (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
        )
        first, second = self.logits(prompt + one[:position])[-1].topk(2).values.tolist()
        return Parting(position, first - second)
