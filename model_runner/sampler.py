"""From requests to the tensors that `Kernels.sample` chooses by.

Randomness comes from a counter-based generator keyed by the seed and counted by position and candidate. So a token
does not depend on what else is in the batch, on preemption, or on which runner samples it.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.interface import SamplingBatch
from model_runner.sampling_params import SamplingParams

SAMPLING_FIELDS = 8
"""What `SamplingParams.row` holds, and the position."""


@dataclass(frozen=True)
class SampleRequest:
    """One row of logits: how to choose, and which token of which candidate it is."""

    params: SamplingParams
    candidate: int
    position: int


def sampling_batch(requests: Rows[SampleRequest]) -> SamplingBatch:
    """One entry for each request, in their order, on the CPU."""
    fields = np.empty((SAMPLING_FIELDS, len(requests)), np.int64)
    rows = [request.params.row(request.candidate) for request in requests]
    fill_sampling_fields(fields, rows, [request.position for request in requests])
    return view_sampling_fields(torch.from_numpy(fields), needs_of(fields))


@dataclass(frozen=True)
class SamplingNeeds:
    """What the host must know of a step's sampling."""

    all_greedy: bool
    """Every temperature is 0."""
    filters: bool
    """Some top_k, top_p or min_p keeps less than all."""
    typical: bool
    """Some typical_p does."""


def fill_sampling_fields(
    fields: npt.NDArray[np.int64], rows: list[npt.NDArray[np.int64]], positions: list[int]
) -> None:
    """Write `SamplingParams.row`s and positions into `fields [SAMPLING_FIELDS, len(rows)]`."""
    if rows:
        fields[:-1] = np.concatenate(rows).reshape(len(rows), -1).T
        fields[-1] = positions


def needs_of(fields: npt.NDArray[np.int64]) -> SamplingNeeds:
    """Look at `fields [SAMPLING_FIELDS, rows]`."""
    temperature, top_p, min_p, typical_p = fields[:4].view(np.float64)
    return SamplingNeeds(
        all_greedy=not temperature.any(),
        filters=bool((fields[4] > 0).any() or (top_p < 1).any() or min_p.any()),
        typical=bool((typical_p < 1).any()),
    )


def view_sampling_fields(fields: torch.Tensor, needs: SamplingNeeds) -> SamplingBatch:
    """`fields [SAMPLING_FIELDS, rows]`, contiguous, as the kernels take them."""
    temperature, top_p, min_p, typical_p = fields[:4].view(torch.float64).unbind()
    top_k, seed, candidate, position = fields[4:].unbind()
    return SamplingBatch(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        candidate=candidate,
        position=position,
        all_greedy=needs.all_greedy,
        filters=needs.filters,
        typical_p=typical_p if needs.typical else None,
    )
