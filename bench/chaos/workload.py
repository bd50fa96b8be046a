"""What the clients ask for, again and again: prompts of many lengths, with prefixes in common."""

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from bench.prompts import PASSAGE
from tests.golden.prompts import PROMPTS

_MOST_PASSAGES = 4


@dataclass(frozen=True)
class Prompt:
    """A greedy request; its answer has `max_tokens` tokens, since it goes on past any end-of-sequence token."""

    token_ids: tuple[int, ...]
    max_tokens: int


def prompts(model: Path, fewest: int = 64, most: int = 128) -> list[Prompt]:
    """Two dozen requests; their prompts have none to three passages in common, and their answers different lengths.

    Args:
        model: directory with the tokenizer.
        fewest: tokens of an answer.
        most: tokens of an answer.
    """
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = [PASSAGE * (number % _MOST_PASSAGES) + text for number, text in enumerate(PROMPTS)]
    step = (most - fewest) / (len(texts) - 1)
    # 7 and 24 have no factor in common, so every length comes once, and neighbours differ.
    lengths = [fewest + round(step * (7 * number % len(texts))) for number in range(len(texts))]
    return [Prompt(tuple(tokenizer.encode(text).ids), length) for text, length in zip(texts, lengths, strict=True)]
