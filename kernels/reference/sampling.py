"""Choosing the next token: a pure function of (seed, candidate, position, logits)."""

import torch

from kernels.interface import SamplingBatch

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


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


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Choose one token id for each row of `logits [rows, vocab]`, in float64."""
    tokens = logits.argmax(dim=-1)
    if batch.all_greedy:
        return tokens
    rows = (batch.temperature > 0).nonzero().squeeze(1)
    temperature = batch.temperature[rows, None]
    # The likeliest token at 0, so that no temperature, however small, divides into infinity minus infinity.
    scaled = logits[rows].double()
    scaled -= scaled.amax(dim=-1, keepdim=True)
    weights = (scaled / temperature).softmax(dim=-1)
    if batch.filters:
        weights = _keep_top(weights, batch.top_k[rows, None], batch.top_p[rows, None])
        least = batch.min_p[rows, None] * weights.amax(dim=-1, keepdim=True)
        weights = weights.masked_fill(weights < least, 0)
    cumulative = weights.cumsum(dim=-1)
    keys = (batch.seed[rows].tolist(), batch.candidate[rows].tolist(), batch.position[rows].tolist())
    draws = weights.new_tensor([uniform(*key) for key in zip(*keys, strict=True)])
    # The first token whose cumulative weight passes the draw; a token of weight 0 never does.
    passed = cumulative > draws[:, None] * cumulative[:, -1:]
    tokens[rows] = passed.to(torch.uint8).argmax(dim=-1)
    return tokens


def _keep_top(weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Zero what top_k drops, then what top_p drops of the rest. The likeliest token always stays."""
    vocab = weights.shape[-1]
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    ordered = ordered.masked_fill((torch.arange(vocab, device=weights.device) >= top_k) & (top_k > 0), 0)
    before = ordered.cumsum(dim=-1) - ordered
    dropped = before >= top_p * ordered.sum(dim=-1, keepdim=True)
    dropped[:, 0] = False
    ordered = ordered.masked_fill(dropped, 0)
    return torch.zeros_like(weights).scatter_(-1, order, ordered)
