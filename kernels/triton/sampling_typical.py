"""Locally typical sampling on the device: rare, so made of torch's operations, none of which waits for the host."""

import dataclasses

import torch

from kernels.interface import SamplingBatch
from kernels.reference.sampling import keep_top, keep_typical, weights_at

_SLICE = 1 << 22
"""Logits that are looked at at a time: some 200 MB of temporaries."""


def drop_atypical(logits: torch.Tensor, batch: SamplingBatch) -> tuple[torch.Tensor, SamplingBatch]:
    """Filter the rows that keep less than all typical tokens, all their filters included.

    Returns:
        Logits [rows, vocab] in which what was dropped is -inf, and a batch without filters for these rows. The others
        are untouched, so their tokens do not depend on whether somebody asks for typical ones.
    """
    if batch.typical_p is None:
        return logits, batch
    active = (batch.typical_p < 1) & (batch.temperature > 0)
    # Rows of temperature 0 are worked out in vain, as others would make the host wait to learn which they are.
    temperature = batch.temperature.where(active, 1.0)
    filtered = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    height = max(1, _SLICE // logits.shape[1])
    for part in (slice(first, first + height) for first in range(0, len(logits), height)):
        weights = weights_at(logits[part], temperature[part])
        weights = keep_top(weights, batch.top_k[part], batch.top_p[part], batch.min_p[part])
        weights = keep_typical(weights, batch.typical_p[part])
        filtered[part] = logits[part].where((weights > 0) | ~active[part, None], -torch.inf)
    return filtered, dataclasses.replace(
        batch,
        top_k=batch.top_k.where(~active, 0),
        top_p=batch.top_p.where(~active, 1.0),
        min_p=batch.min_p.where(~active, 0.0),
        typical_p=None,
    )
