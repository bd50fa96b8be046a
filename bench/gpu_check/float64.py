"""What the operations should give, in float64 from the very values that the kernels get. Works on any device."""

import itertools

import torch

from kernels.interface import AttentionBatch, AttentionParams
from kernels.kv_pool import KvPool


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected; NaN if any element of `out` is."""
    expected = expected.double()
    return float((out.double() - expected).norm() / expected.norm())


def stored(kv_pool: KvPool, table: torch.Tensor, layer: int) -> torch.Tensor:
    """K and V in the blocks of `table [blocks]`, as `[2, num_kv_heads, blocks * block_size, head_dim]`."""
    blocks = kv_pool.blocks[table, layer].double()
    if kv_pool.scales is not None:
        blocks = blocks * kv_pool.scales[table, layer].double().unsqueeze(-1)
    return blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)


def attention(
    batch: AttentionBatch, lengths: list[int], kv_pool: KvPool, params: AttentionParams, layer: int, query: torch.Tensor
) -> torch.Tensor:
    """Attention of `query [tokens, num_heads, head_dim]` over the sequences' first `lengths` tokens.

    Zeros for a sequence whose length is 0.
    """
    out = []
    starts = [0, *itertools.accumulate(batch.query_lengths)]
    for sequence, length in enumerate(lengths):
        mine = query[starts[sequence] : starts[sequence + 1]].double()
        if not length:
            out.append(torch.zeros_like(mine))
            continue
        num_blocks = -(-length // kv_pool.block_size)
        key, value = stored(kv_pool, batch.block_tables[sequence, :num_blocks], layer)[:, :, :length]
        out.append(_attend(mine, key, value, params))
    return torch.cat(out)


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams) -> torch.Tensor:
    """One sequence: `query [tokens, num_heads, head_dim]`, `key` and `value` `[num_kv_heads, length, head_dim]`."""
    tokens, num_heads, head_dim = query.shape
    num_kv_heads, length, _ = key.shape
    grouped = query.view(tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("tkgd,kld->tkgl", grouped, key) * params.scale
    if params.soft_cap is not None:
        scores = params.soft_cap * torch.tanh(scores / params.soft_cap)
    position = torch.arange(length - tokens, length, device=query.device)[:, None]
    distance = position - torch.arange(length, device=query.device)
    visible = distance >= 0
    if params.sliding_window is not None:
        visible &= distance < params.sliding_window
    weights = scores.masked_fill(~visible[:, None, None], float("-inf")).softmax(-1)
    return torch.einsum("tkgl,kld->tkgd", weights, value).reshape(tokens, num_heads, head_dim)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`x [tokens, heads, head_dim]` rotated by `cos` and the half-negated `sin`, `[tokens, head_dim]` each."""
    x = x.double()
    return x * cos.double().unsqueeze(1) + x.roll(x.shape[-1] // 2, -1) * sin.double().unsqueeze(1)
