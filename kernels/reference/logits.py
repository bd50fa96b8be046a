"""What is done to logits before a token is chosen, and how likely they make tokens."""

import torch

from kernels.interface import LogitEdits, Logprobs, Penalties

_SLICE = 1 << 22
"""Logits whose probabilities are worked out at a time: some 100 MB of temporaries."""


def edit_logits(logits: torch.Tensor, edits: LogitEdits) -> None:
    """Change `logits [rows, vocab]` in place; what no edit names keeps every bit."""
    if edits.penalties is not None:
        _penalise(logits, edits.penalties)
    if edits.bias is not None:
        rows, token_ids, values = edits.bias
        logits[rows, token_ids] = (logits[rows, token_ids].double() + values).float()
    if edits.allowed is not None:
        restricted, rows, token_ids = edits.allowed
        allowed = logits[rows, token_ids]
        logits.index_fill_(0, restricted, -torch.inf)
        logits[rows, token_ids] = allowed
    if edits.banned is not None:
        rows, token_ids = edits.banned
        # Not a number on the host: to put that into an index is a copy to the device, which waits.
        logits.index_put_((rows, token_ids), logits.new_full((), -torch.inf))


def _penalise(logits: torch.Tensor, penalties: Penalties) -> None:
    owners, token_ids, counts = penalties.owners, penalties.token_ids, penalties.counts
    rows, repetition = penalties.rows[owners], penalties.repetition[owners]
    values = logits[rows, token_ids].double()
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= penalties.presence[owners] * (counts > 0) + penalties.frequency[owners] * counts
    earlier = len(owners) - len(penalties.rows)
    for entries in (slice(earlier), slice(earlier, None)):
        logits[rows[entries], token_ids[entries]] = values[entries].float()


def logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> Logprobs:
    """How likely each row of `logits [rows, vocab]` makes its `token_ids [rows, tokens]` and the likeliest ones."""
    rows, vocab = logits.shape
    num_top = min(num_top, vocab)
    found = Logprobs(
        chosen=logits.new_empty(token_ids.shape, dtype=torch.float64),
        ranks=torch.empty_like(token_ids),
        top_token_ids=token_ids.new_empty(rows, num_top),
        top=logits.new_empty(rows, num_top, dtype=torch.float64),
    )
    height = max(1, _SLICE // vocab)
    for part in (slice(first, first + height) for first in range(0, rows, height)):
        some, chosen = logits[part], token_ids[part]
        all_logprobs = some.double().log_softmax(dim=-1)
        found.chosen[part] = all_logprobs.gather(-1, chosen)
        found.ranks[part] = _ranks(some, some.gather(-1, chosen))
        if num_top:
            found.top_token_ids[part] = likeliest = _likeliest(some, num_top)
            found.top[part] = all_logprobs.gather(-1, likeliest)
    return found


def _ranks(logits: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One more than the number of logits above each of `values [rows, n]`."""
    if values.shape[1] == 1:
        return 1 + (logits > values).sum(dim=-1, keepdim=True)
    return 1 + logits.shape[1] - torch.searchsorted(logits.sort(dim=-1).values, values, right=True)


def _likeliest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """[rows, count] token ids, likeliest first, of equals the lower id."""
    # Numbers of which no two are alike, for topk leaves open which of equals it takes: the bits of a float as an
    # integer of the same order above, the id below. Adding 0 makes -0 into 0.
    bits = (logits + 0.0).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    last = logits.shape[-1] - 1
    keys = (ordered << 32) | torch.arange(last, -1, -1, device=logits.device)
    return last - (keys.topk(count).values & 0x7FFFFFFF)
