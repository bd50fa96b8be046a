"""Choosing the next token: a pure function of (seed, candidate, position, logits)."""

import torch

from kernels.interface import SamplingBatch
from kernels.reference.noise import draw_key, exponentials, token_bits

_SLICE = 1 << 18
"""Tokens that race at a time for each thread: enough to share out, and what is made of them stays in the cache."""


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Choose one token id for each row of `logits [rows, vocab]`, in float64."""
    if batch.all_greedy:
        return logits.argmax(dim=-1)
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    greedy = (batch.temperature == 0).nonzero().squeeze(1)
    tokens[greedy] = logits.index_select(0, greedy).argmax(dim=-1)
    height = max(1, _SLICE * torch.get_num_threads() // logits.shape[1])
    for rows in (batch.temperature > 0).nonzero().squeeze(1).split(height):
        times = exponentials(token_bits(_keys(batch, rows), logits.shape[1]))
        tokens[rows] = _kept_weights(logits, batch, rows).div_(times).argmax(dim=-1)
    return tokens


def _keys(batch: SamplingBatch, rows: torch.Tensor) -> torch.Tensor:
    """[len(rows)] int64."""
    numbers = (batch.seed[rows].tolist(), batch.candidate[rows].tolist(), batch.position[rows].tolist())
    return rows.new_tensor([draw_key(*draw) for draw in zip(*numbers, strict=True)])


def _kept_weights(logits: torch.Tensor, batch: SamplingBatch, rows: torch.Tensor) -> torch.Tensor:
    """[len(rows), vocab] float64: 0 for what is not kept, which so never arrives."""
    weights = weights_at(logits.index_select(0, rows), batch.temperature[rows])
    if batch.filters:
        weights = keep_top(weights, batch.top_k[rows], batch.top_p[rows], batch.min_p[rows])
    if batch.typical_p is not None:
        weights = keep_typical(weights, batch.typical_p[rows])
    return weights


def weights_at(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Probabilities [rows, vocab] float64 at `temperature [rows]`, which is above 0."""
    # The likeliest token at 0, so that no temperature, however small, divides into infinity minus infinity.
    scaled = logits.double()
    scaled -= logits.amax(dim=-1, keepdim=True)
    scaled /= temperature[:, None]
    return scaled.softmax(dim=-1)


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
