"""Edits of logits and log-probabilities on the device against the same on the CPU, and that the host waits for none."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields

import torch

from bench.gpu_check.task import Check, Setting, at_most, verified
from kernels import reference
from kernels.interface import Kernels, LogitEdits, Logprobs, Penalties

_NUM_TOP = 20
_BOUND = 1e-9
"""Of sums of float64 in another order."""


def check_logits(setting: Setting, kernels: Kernels) -> Iterator[Check]:
    """As many rows as a large batch has, all of which ask for everything."""
    rows, vocab = (4, 300) if setting.dry_run else (256, 128_256)
    generator = torch.Generator().manual_seed(setting.rng("logits").randrange(1 << 62))
    logits = torch.randn(rows, vocab, generator=generator) * 3
    edits, token_ids = _edits(rows, vocab, generator), torch.randint(vocab, (rows, 1), generator=generator)
    here, there = logits.clone(), logits.to(setting.device)
    edits_there, tokens_there = _moved(edits, setting.device), token_ids.to(setting.device)
    reference.edit_logits(here, edits)
    expected = reference.logprobs(logits, token_ids, _NUM_TOP)
    with _nothing_waits(setting):
        found = kernels.logprobs(there, tokens_there, _NUM_TOP)
        kernels.edit_logits(there, edits_there)
    wrong = int((there.cpu() != here).sum())
    yield verified("edits of logits", not wrong, f"{wrong} of {here.numel()} logits differ", "0")
    yield from _compare(found, expected)


def _compare(found: Logprobs, expected: Logprobs) -> Iterator[Check]:
    difference = max(
        (getattr(found, name).cpu() - getattr(expected, name)).abs().max().item() for name in ("chosen", "top")
    )
    yield at_most("log-probabilities", difference, _BOUND)
    same = all(torch.equal(getattr(found, name).cpu(), getattr(expected, name)) for name in ("ranks", "top_token_ids"))
    yield verified("ranks and likeliest tokens", same, "the same" if same else "others", "the same")


def _edits(rows: int, vocab: int, generator: torch.Generator) -> LogitEdits:
    def some(count: int) -> torch.Tensor:
        """[rows, count]: in each row different tokens."""
        return torch.rand(rows, vocab, generator=generator).argsort(-1)[:, :count]

    def numbered(count: int) -> torch.Tensor:
        return torch.arange(rows).repeat_interleave(count)

    counted = some(50)
    repetition, presence, frequency = torch.rand(3, rows, generator=generator, dtype=torch.float64) + 0.5
    penalties = Penalties(
        rows=torch.arange(rows),
        repetition=repetition,
        presence=presence,
        frequency=frequency,
        owners=torch.cat((numbered(50), torch.arange(rows))),
        token_ids=torch.cat((counted.flatten(), counted[:, 7])),
        counts=torch.randint(5, (rows * 51,), generator=generator),
    )
    values = torch.randn(rows * 20, generator=generator, dtype=torch.float64)
    return LogitEdits(
        penalties=penalties,
        bias=(numbered(20), some(20).flatten(), values),
        allowed=(torch.arange(0, rows, 2), numbered(100).view(rows, 100)[::2].flatten(), some(100)[::2].flatten()),
        banned=(numbered(10), some(10).flatten()),
    )


def _moved(edits: LogitEdits, device: str) -> LogitEdits:
    def moved(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.to(device) for tensor in tensors]

    if edits.penalties is None or edits.bias is None or edits.allowed is None or edits.banned is None:
        raise ValueError("every edit is to be checked")
    (bias_rows, biased, values), (restricted, rows, allowed) = moved(edits.bias), moved(edits.allowed)
    ban_rows, banned = moved(edits.banned)
    penalties = Penalties(*moved(getattr(edits.penalties, column.name) for column in fields(Penalties)))
    return LogitEdits(penalties, (bias_rows, biased, values), (restricted, rows, allowed), (ban_rows, banned))


@contextmanager
def _nothing_waits(setting: Setting) -> Iterator[None]:
    """Whatever makes the host wait for the device raises."""
    if setting.dry_run:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
