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
    weights = weights_at(logits[rows], batch.temperature[rows])
    if batch.filters:
        weights = keep_top(weights, batch.top_k[rows], batch.top_p[rows], batch.min_p[rows])
    if batch.typical_p is not None:
        weights = keep_typical(weights, batch.typical_p[rows])
    cumulative = weights.cumsum(dim=-1)
    keys = (batch.seed[rows].tolist(), batch.candidate[rows].tolist(), batch.position[rows].tolist())
    draws = weights.new_tensor([uniform(*key) for key in zip(*keys, strict=True)])
    # The first token whose cumulative weight passes the draw; a token of weight 0 never does.
    passed = cumulative > draws[:, None] * cumulative[:, -1:]
    tokens[rows] = passed.to(torch.uint8).argmax(dim=-1)
    return tokens


def weights_at(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Probabilities [rows, vocab] float64 at `temperature [rows]`, which is above 0."""
    # The likeliest token at 0, so that no temperature, however small, divides into infinity minus infinity.
    scaled = logits.double()
    scaled -= scaled.amax(dim=-1, keepdim=True)
    return (scaled / temperature[:, None]).softmax(dim=-1)


def keep_top(weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Zero what top_k drops, then what top_p and min_p drop of the rest. The likeliest token always stays."""
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    kept = top_k[:, None]
    ordered = ordered.masked_fill((torch.arange(weights.shape[-1], device=weights.device) >= kept) & (kept > 0), 0)
    ordered = _keep_first(ordered, top_p)
    ordered = ordered.masked_fill(ordered < min_p[:, None] * ordered[:, :1], 0)
    return torch.zeros_like(weights).scatter_(-1, order, ordered)


def keep_typical(weights: torch.Tensor, typical_p: torch.Tensor) -> torch.Tensor:
    """Zero all but the most typical tokens. At least one stays; of equally typical ones the lower id comes first."""
    probabilities = weights / _totals(weights)
    expected = _totals(torch.special.entr(probabilities))
    # What has no weight is infinitely surprising, and so the least typical.
    order = (-probabilities.log() - expected).abs().sort(dim=-1, stable=True).indices
    return torch.zeros_like(weights).scatter_(-1, order, _keep_first(weights.gather(-1, order), typical_p))


def _keep_first(ordered: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Zero all but as many of the first weights as are needed to reach `share [rows]` of their sum; 1: keep all."""
    cumulative = ordered.cumsum(dim=-1)
    dropped = (cumulative - ordered >= share[:, None] * cumulative[:, -1:]) & (share[:, None] < 1)
    dropped[:, 0] = False
    return ordered.masked_fill(dropped, 0)


def _totals(values: torch.Tensor) -> torch.Tensor:
    """[rows, 1]. A sum over many values may add them up in another order where there are more rows; this does not."""
    return values.cumsum(dim=-1)[:, -1:]
