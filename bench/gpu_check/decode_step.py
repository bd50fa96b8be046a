"""Decode attention of one step, over a block table and over the same values lying contiguous."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from bench.gpu_check.timing import L2_BYTES
from kernels.interface import AttentionBatch, AttentionParams, Kernels
from kernels.kv_layout import KvLayout
from kernels.kv_pool import KvPool

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
"""Of Llama 3.1 8B."""
DTYPE = torch.bfloat16
MOST_LAYERS = 32
TOKEN_BYTES = 2 * NUM_KV_HEADS * HEAD_DIM * 2
"""K and V of one token in one layer."""
_BYTES_IN_TURN = 4 * L2_BYTES
_PARAMS = AttentionParams(HEAD_DIM**-0.5)


@dataclass(frozen=True)
class DecodeShape:
    """So many sequences of the same length, a multiple of the block size."""

    batch_size: int
    context_length: int

    def __str__(self) -> str:
        return f"batch {self.batch_size} x {self.context_length // 1024}k"

    @property
    def layer_bytes(self) -> int:
        """K and V that one call reads."""
        return self.batch_size * self.context_length * TOKEN_BYTES

    @property
    def num_blocks(self) -> int:
        """Of all block tables together."""
        return self.batch_size * self.context_length // BLOCK_SIZE


def random_bytes(num_bytes: int, device: str) -> torch.Tensor:
    """Memory for pools, full of bfloat16 normal numbers; they repeat after at most 1 GiB."""
    memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    chunk = min(num_bytes, 1 << 30)
    memory[:chunk].view(DTYPE).normal_()
    for start in range(chunk, num_bytes, chunk):
        memory[start : start + chunk] = memory[: min(chunk, num_bytes - start)]
    return memory


class DecodeStep:
    """Calls that read more than the L2 cache holds when run in turns, as the layers of a model do.

    Args:
        memory: for the pool, which is carved as a model's of as many layers as there is room for, up to 32.
        shape: of the step.
        shuffled: whether the block table names blocks in random order, or one after the other.

    Raises:
        ValueError: the shape does not fit.
    """

    def __init__(self, memory: torch.Tensor, shape: DecodeShape, *, shuffled: bool = True) -> None:
        self.shape = shape
        self.num_layers = min(MOST_LAYERS, len(memory) // ((shape.num_blocks + 1) * BLOCK_SIZE * TOKEN_BYTES))
        if not self.num_layers:
            raise ValueError(f"{shape} needs {shape.layer_bytes / 2**30:.0f} GiB for one layer")
        layout = KvLayout(self.num_layers, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, "bfloat16")
        self.pool = KvPool.over(memory, layout, layout.num_blocks(len(memory)))
        device = memory.device
        wanted = -(-_BYTES_IN_TURN // (self.num_layers * shape.layer_bytes))
        num_tables = max(1, min(wanted, (len(self.pool.raw) - 1) // shape.num_blocks))
        count = num_tables * shape.num_blocks
        ids = (
            torch.randperm(len(self.pool.raw) - 1, device=device)[:count]
            if shuffled
            else torch.arange(count, device=device)
        )
        self.tables = (ids + 1).view(num_tables, shape.batch_size, -1)
        self.query = torch.randn(shape.batch_size, NUM_HEADS, HEAD_DIM, device=device).to(DTYPE)

    def paged(self, kernels: Kernels) -> list[Callable[[], torch.Tensor]]:
        """One call for each table and layer; outputs are `[batch, heads, head_dim]`."""
        calls: list[Callable[[], torch.Tensor]] = []
        for table in self.tables:
            attention = kernels.prepare_attention(self._batch(table), self.pool, _PARAMS)
            calls += [functools.partial(attention.attend, layer, self.query) for layer in range(self.num_layers)]
        return calls

    def contiguous(self) -> dict[str, list[Callable[[], torch.Tensor]]]:
        """The same by torch's SDPA on contiguous K and V, in two forms; outputs are `[batch, kv_heads, ...]`."""
        copies = min(self.num_layers, max(1, -(-_BYTES_IN_TURN // self.shape.layer_bytes)))
        pairs = [self.gathered(layer) for layer in range(copies)]
        single = self.query.unsqueeze(2)
        # The heads of a group are to their K and V what tokens without a causal mask would be.
        group = self.query.unflatten(1, (NUM_KV_HEADS, -1))
        attend = F.scaled_dot_product_attention
        return {
            "SDPA, enable_gqa": [functools.partial(attend, single, *pair, enable_gqa=True) for pair in pairs],
            "SDPA, group as queries": [functools.partial(attend, group, *pair) for pair in pairs],
        }

    def gathered(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the first table, `[batch, kv_heads, context, head_dim]` each, contiguous."""
        shape = (self.shape.batch_size, NUM_KV_HEADS, self.shape.context_length, HEAD_DIM)
        key, value = (torch.empty(shape, dtype=DTYPE, device=self.query.device) for _ in range(2))
        for sequence, table in enumerate(self.tables[0]):
            for which, out in enumerate((key, value)):
                out[sequence] = self.pool.blocks[table, layer, which].transpose(0, 1).flatten(1, 2)
        return key, value

    def _batch(self, table: torch.Tensor) -> AttentionBatch:
        batch_size, length = self.shape.batch_size, self.shape.context_length
        ends = torch.full((batch_size,), length, device=table.device)
        return AttentionBatch(
            slot_mapping=table[:, -1] * BLOCK_SIZE + BLOCK_SIZE - 1,
            block_tables=table,
            query_starts=torch.arange(batch_size + 1, device=table.device),
            context_ends=ends,
            query_lengths=[1] * batch_size,
            context_lengths=[length] * batch_size,
            num_decodes=batch_size,
        )
