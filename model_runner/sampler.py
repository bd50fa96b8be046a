"""Choosing the next token: a pure function of (seed, candidate, position, logits).

Randomness comes from a counter-based generator, Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC'11), keyed by the seed and counted by position and candidate. So a token does not depend on what else is
in the batch, on preemption, or on which runner samples it. One uniform number is drawn a token and looked up in the
cumulative distribution over the vocabulary in index order, so that near-equal logits cannot trade places.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch

from model_runner.sequence import SamplingParams

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


@dataclass(frozen=True)
class SampleRequest:
    """One row of logits: how to choose, and which token of which candidate it is."""

    params: SamplingParams
    candidate: int
    position: int


def philox4x32(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10: four 32-bit words that depend on nothing but `key` and `counter` (32-bit words, too)."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(_ROUNDS):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (product1 >> 32) ^ c1 ^ k0, product1 & _MASK, (product0 >> 32) ^ c3 ^ k1, product0 & _MASK
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, candidate: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    words = philox4x32((seed & _MASK, seed >> 32 & _MASK), (position & _MASK, candidate & _MASK, 0, 0))
    return (words[0] << 21 | words[1] >> 11) / (1 << 53)


def sample(logits: torch.Tensor, requests: Rows[SampleRequest]) -> list[int]:
    """Choose one token id for each row.

    Args:
        logits: `[rows, vocab]`, float32, finite but for -inf.
        requests: one for each row.
    """
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    random_rows = [row for row, request in enumerate(requests) if request.params.temperature > 0]
    if random_rows:
        chosen = _sample_random(logits[random_rows], [requests[row] for row in random_rows])
        for row, token in zip(random_rows, chosen, strict=True):
            tokens[row] = token
    return tokens


def _sample_random(logits: torch.Tensor, requests: list[SampleRequest]) -> list[int]:
    params = [request.params for request in requests]
    temperature = logits.new_tensor([p.temperature for p in params], dtype=torch.float64)
    # The likeliest token at 0, so that no temperature, however small, divides into infinity minus infinity.
    scaled = logits.double() - logits.amax(dim=-1, keepdim=True)
    weights = (scaled / temperature[:, None]).softmax(dim=-1)
    if any(p.top_k > 0 or p.top_p < 1 for p in params):
        weights = _keep_top(weights, params)
    if any(p.min_p > 0 for p in params):
        min_p = weights.new_tensor([p.min_p for p in params])
        weights = weights.masked_fill(weights < min_p[:, None] * weights.amax(dim=-1, keepdim=True), 0)
    cumulative = weights.cumsum(dim=-1)
    draws = weights.new_tensor([uniform(r.params.seed, r.candidate, r.position) for r in requests])
    # The first token whose cumulative weight passes the draw; a token of weight 0 never does.
    passed = cumulative > draws[:, None] * cumulative[:, -1:]
    return passed.to(torch.uint8).argmax(dim=-1).tolist()


def _keep_top(weights: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Zero what top_k drops, then what top_p drops of the rest. The likeliest token always stays."""
    vocab = weights.shape[-1]
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    top_k = torch.tensor([p.top_k if 0 < p.top_k < vocab else vocab for p in params])
    top_p = weights.new_tensor([p.top_p for p in params])
    ordered = ordered.masked_fill(torch.arange(vocab) >= top_k[:, None], 0)
    before = ordered.cumsum(dim=-1) - ordered
    dropped = before >= top_p[:, None] * ordered.sum(dim=-1, keepdim=True)
    dropped[:, 0] = False
    ordered = ordered.masked_fill(dropped, 0)
    return torch.zeros_like(weights).scatter_(-1, order, ordered)
