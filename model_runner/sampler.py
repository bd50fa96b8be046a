"""From requests to the tensors that `Kernels.sample` chooses by.

Randomness comes from a counter-based generator keyed by the seed and counted by position and candidate. So a token
does not depend on what else is in the batch, on preemption, or on which runner samples it.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch

from kernels.interface import SamplingBatch
from model_runner.sequence import SamplingParams


@dataclass(frozen=True)
class SampleRequest:
    """One row of logits: how to choose, and which token of which candidate it is."""

    params: SamplingParams
    candidate: int
    position: int


def sampling_batch(requests: Rows[SampleRequest]) -> SamplingBatch:
    """One entry for each request, in their order, on the CPU."""
    params = [request.params for request in requests]

    def reals(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    def integers(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64)

    return SamplingBatch(
        temperature=reals([p.temperature for p in params]),
        top_k=integers([p.top_k for p in params]),
        top_p=reals([p.top_p for p in params]),
        min_p=reals([p.min_p for p in params]),
        seed=integers([_signed(p.seed) for p in params]),
        candidate=integers([request.candidate for request in requests]),
        position=integers([request.position for request in requests]),
        all_greedy=all(p.temperature == 0 for p in params),
        filters=any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params),
    )


def _signed(seed: int) -> int:
    """The 64 bits of a seed as torch's integers have them."""
    return seed - (1 << 64) if seed >> 63 else seed
