"""Other people's attention through a block table, beside ours: torch's FlexAttention, and FlashInfer if it is there."""

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.gpu_check.decode_step import (
    BLOCK_SIZE,
    DTYPE,
    HEAD_DIM,
    NUM_HEADS,
    NUM_KV_HEADS,
    DecodeShape,
    DecodeStep,
    random_bytes,
)
from bench.gpu_check.float64 import relative_error
from bench.gpu_check.task import Check, NotRunError, Setting, Task, at_most, compared, recorded
from bench.gpu_check.timing import per_call_s
from kernels.select import select_kernels

_BOUND = 1e-2
_FLEX_PAGE = 128
"""FlexAttention's masks have blocks of this size on a GPU, and its pages must be as large."""


def tasks(setting: Setting) -> list[Task]:
    """The section."""
    del setting
    return [Task("FlexAttention", _flex, limit_s=60), Task("FlashInfer", _flashinfer, limit_s=40)]


def _step(setting: Setting) -> DecodeStep:
    """One layer: the others need copies of their own."""
    shape = DecodeShape(2, 256) if setting.dry_run else DecodeShape(64, 8192)
    num_bytes = (shape.num_blocks + 2) * BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM * 4
    return DecodeStep(random_bytes(num_bytes, setting.device), shape)


def _compare(setting: Setting, name: str, step: DecodeStep, theirs: Callable[[], torch.Tensor]) -> Iterator[Check]:
    """Equal results, and on a device who takes longer."""
    calls = step.paged(select_kernels("reference" if setting.dry_run else "triton"))
    yield at_most(f"{name}: differs from ours", relative_error(theirs(), calls[0]()), _BOUND)
    if setting.dry_run:
        return
    ours_s, theirs_s = per_call_s(calls[:1]), per_call_s([theirs])
    yield recorded(f"{name}, {step.shape}", f"{theirs_s * 1e6:.0f} us, ours {ours_s * 1e6:.0f} us", theirs_s)
    yield compared(f"ours against {name}, {step.shape}", ours_s / theirs_s)


def _flex(setting: Setting) -> Iterator[Check]:
    step = _step(setting)
    yield from _compare(setting, "FlexAttention, paged", step, flex_call(step, compiled=not setting.dry_run))


def flex_call(step: DecodeStep, *, compiled: bool) -> Callable[[], torch.Tensor]:
    """Decode attention by FlexAttention over pages that hold what the first table names; `[batch, heads, head_dim]`."""
    from torch.nn.attention.experimental._paged_attention import PagedAttention as TorchPages
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    batch_size, length, device = step.shape.batch_size, step.shape.context_length, str(step.query.device)
    num_pages = batch_size * length // _FLEX_PAGE
    pages = TorchPages(num_pages, _FLEX_PAGE, batch_size, device=device)
    for sequence in torch.randperm(batch_size).tolist():
        pages.reserve(torch.tensor(sequence, device=device), torch.tensor(length, device=device))
    shape = (1, NUM_KV_HEADS, num_pages * _FLEX_PAGE, HEAD_DIM)
    key, value = (torch.empty(shape, dtype=DTYPE, device=device) for _ in range(2))
    everyone = torch.arange(batch_size, device=device)
    positions = torch.arange(length, device=device).expand(batch_size, -1)
    pages.assign(everyone, positions, *step.gathered(0), key, value)

    def visible(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return position < length

    mask = create_block_mask(visible, batch_size, 1, 1, length, device=device, BLOCK_SIZE=_FLEX_PAGE)
    paged_mask = pages.convert_logical_block_mask(mask)
    attend: Any = torch.compile(flex_attention) if compiled else flex_attention
    query = step.query.unsqueeze(2)
    return lambda: attend(query, key, value, block_mask=paged_mask, enable_gqa=True).squeeze(2)


def _flashinfer(setting: Setting) -> Iterator[Check]:
    if importlib.util.find_spec("flashinfer") is None:
        yield recorded("FlashInfer", "not installed")
        return
    if setting.dry_run:
        raise NotRunError("FlashInfer is installed, but has no CPU")
    step = _step(setting)
    yield from _compare(setting, "FlashInfer", step, flashinfer_call(step))


def flashinfer_call(step: DecodeStep) -> Callable[[], torch.Tensor]:
    """Decode attention by FlashInfer over our own pool: its layout HND is ours of one layer (docs.flashinfer.ai)."""
    flashinfer: Any = importlib.import_module("flashinfer")
    batch_size, table = step.shape.batch_size, step.tables[0].to(torch.int32)
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=table.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    starts = torch.arange(batch_size + 1, dtype=torch.int32, device=table.device) * table.shape[1]
    last = torch.full((batch_size,), BLOCK_SIZE, dtype=torch.int32, device=table.device)
    heads = (NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE)
    wrapper.plan(starts, table.flatten(), last, *heads, q_data_type=DTYPE, kv_data_type=DTYPE)
    return lambda: wrapper.run(step.query, step.pool.blocks[:, 0])
