"""How close attention comes to the memory's bandwidth, and what the block table costs against contiguous K and V."""

import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from bench.gpu_check.decode_step import (
    BLOCK_SIZE,
    DTYPE,
    HEAD_DIM,
    NUM_HEADS,
    NUM_KV_HEADS,
    TOKEN_BYTES,
    DecodeShape,
    DecodeStep,
    random_bytes,
)
from bench.gpu_check.facts import copy_bandwidth
from bench.gpu_check.float64 import relative_error
from bench.gpu_check.task import Check, NotRunError, Setting, Task, at_least, at_most, compared, recorded
from bench.gpu_check.timing import per_call_s
from kernels.interface import AttentionBatch, AttentionParams
from kernels.kv_layout import KvLayout
from kernels.kv_pool import KvPool
from kernels.select import select_kernels

_PROMISED = DecodeShape(64, 8192)
_LEAST_SHARE, _MOST_COST = 0.85, 0.05
_POOL_BYTES = 64 << 30
_SHARE_OF_FREE = 0.5
"""The other half is for contiguous copies."""
_BOUND = 1e-2
_PREFILLS = (2048, 8192)


def tasks(setting: Setting) -> list[Task]:
    """The section: the promised shape first, the rest of the grid last."""
    grid = [DecodeShape(batch, context) for batch in (1, 8, 64, 256) for context in (1024, 8192, 32_768)]
    shapes = [_PROMISED, *(shape for shape in grid if shape != _PROMISED)]
    memory = functools.cache(lambda: _memory(setting))
    decodes = [
        Task(f"decode, {shape}", functools.partial(_decode, shape=shape, memory=memory), 25, needs_device=True)
        for shape in shapes
    ]
    prefills = [
        Task(f"prefill of {tokens}", functools.partial(_prefill, tokens=tokens), 25, needs_device=True)
        for tokens in _PREFILLS
    ]
    return [decodes[0], Task("paged and contiguous", _agree), *prefills, *decodes[1:]]


def _memory(setting: Setting) -> torch.Tensor:
    free, _ = torch.cuda.mem_get_info()
    num_bytes = int(min(_POOL_BYTES, free * _SHARE_OF_FREE)) >> 21 << 21
    return random_bytes(num_bytes, setting.device)


def _agree(setting: Setting) -> Iterator[Check]:
    """Whatever is timed computes the same."""
    kernels = select_kernels("reference" if setting.dry_run else "triton")
    step = DecodeStep(random_bytes(8 << 20 if setting.dry_run else 256 << 20, setting.device), DecodeShape(3, 64))
    ours = step.paged(kernels)[0]()
    for name, calls in step.contiguous().items():
        yield at_most(f"{name}: differs from the block table's", relative_error(calls[0]().view_as(ours), ours), _BOUND)


def _decode(setting: Setting, shape: DecodeShape, memory: Callable[[], torch.Tensor]) -> Iterator[Check]:
    bandwidth, kernels = copy_bandwidth(setting), select_kernels("triton")
    try:
        step = DecodeStep(memory(), shape)
    except ValueError as error:
        raise NotRunError(str(error)) from error
    ours = per_call_s(step.paged(kernels))
    share = shape.layer_bytes / ours / bandwidth
    name, promised = f"decode, {shape}", shape == _PROMISED
    figure = f"{share:.1%} of copy bandwidth, {ours * 1e6:.0f} us"
    if promised:
        yield at_least(f"{name}: share of copy bandwidth", share, _LEAST_SHARE)
    yield recorded(f"{name}: block table", figure, share)
    in_order = per_call_s(DecodeStep(memory(), shape, shuffled=False).paged(kernels))
    yield recorded(
        f"{name}: shuffled blocks against blocks in order", f"{ours / in_order - 1:+.1%}", ours / in_order - 1
    )
    try:
        rivals = {rival: per_call_s(calls) for rival, calls in step.contiguous().items()}
    except torch.OutOfMemoryError as error:
        raise NotRunError(f"{name}: no room for contiguous K and V beside the pool") from error
    for rival, seconds in rivals.items():
        rate = shape.layer_bytes / seconds / bandwidth
        yield recorded(f"{name}: {rival}, contiguous", f"{rate:.1%} of copy bandwidth, {seconds * 1e6:.0f} us", rate)
    ratio = ours / min(rivals.values())
    if promised:
        yield at_most(f"{name}: cost of the block table", ratio - 1, _MOST_COST)
    yield compared(f"{name}: block table against the better of these", ratio)


def _prefill(setting: Setting, tokens: int) -> Iterator[Check]:
    """One prompt in one chunk, causal."""
    kernels = select_kernels("triton")
    layout = KvLayout(1, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, "bfloat16")
    num_blocks = tokens // BLOCK_SIZE
    memory = random_bytes(4 * tokens * TOKEN_BYTES, setting.device)
    pool = KvPool.over(memory, layout, layout.num_blocks(len(memory)))
    table = torch.randperm(len(pool.raw) - 1, device=setting.device)[:num_blocks] + 1
    within = torch.arange(BLOCK_SIZE, device=setting.device)
    batch = AttentionBatch(
        slot_mapping=(table.unsqueeze(1) * BLOCK_SIZE + within).flatten(),
        block_tables=table.unsqueeze(0),
        query_starts=torch.tensor([0, tokens], device=setting.device),
        context_ends=torch.tensor([tokens], device=setting.device),
        query_lengths=[tokens],
        context_lengths=[tokens],
        num_decodes=0,
    )
    query = torch.randn(tokens, NUM_HEADS, HEAD_DIM, device=setting.device).to(DTYPE)
    key, value = (pool.blocks[table, 0, which].transpose(0, 1).flatten(1, 2).unsqueeze(0) for which in range(2))
    attention = kernels.prepare_attention(batch, pool, AttentionParams(HEAD_DIM**-0.5))
    queries = query.transpose(0, 1).unsqueeze(0)
    sdpa = functools.partial(F.scaled_dot_product_attention, queries, key, value, is_causal=True, enable_gqa=True)
    error = relative_error(attention.attend(0, query), sdpa()[0].transpose(0, 1))
    yield at_most(f"prefill of {tokens}: differs from SDPA's", error, _BOUND)
    flops = 2 * tokens**2 * NUM_HEADS * HEAD_DIM
    ours, theirs = (flops / per_call_s([call]) for call in (functools.partial(attention.attend, 0, query), sdpa))
    yield recorded(f"prefill of {tokens}: block table", f"{ours / 1e12:.0f} TFLOP/s", ours)
    yield recorded(f"prefill of {tokens}: SDPA, contiguous", f"{theirs / 1e12:.0f} TFLOP/s", theirs)
    yield recorded(
        f"prefill of {tokens}: block table against SDPA", f"{theirs / ours - 1:+.1%} time", theirs / ours - 1
    )
