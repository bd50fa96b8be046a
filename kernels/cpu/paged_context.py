"""Gathering the K and V of some sequences out of their blocks.

A row is what is contiguous for one (block, layer, K or V, head): `block_size * head_dim` values. Moving on by a layer
is an offset, so the row numbers of layer 0, derived once a step, serve all layers. Rows are counted in 64 bits.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PagedContext:
    """Contexts of some sequences, padded to one length of whole blocks."""

    rows: torch.Tensor
    """[2 * sequences * num_kv_heads * blocks]: what to gather for layer 0."""
    positions: torch.Tensor
    """[sequences, length]: position in its sequence of each gathered slot; those past its end hold no token."""
    gathered: torch.Tensor
    """[2, sequences, num_kv_heads, length, head_dim]: where each layer's K and V go in turn."""

    def gather(self, pool_rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, `[sequences, num_kv_heads, length, head_dim]` each, valid until the next call.

        Args:
            pool_rows: [rows, block_size * head_dim], beginning with the layer's first row of block 0.
        """
        torch.index_select(pool_rows, 0, self.rows, out=self.gathered.view(-1, pool_rows.shape[1]))
        key, value = self.gathered
        return key, value


def prepare_context(
    kv_pool: torch.Tensor, block_tables: torch.Tensor, first_blocks: torch.Tensor, num_blocks: int
) -> PagedContext:
    """Derive what to gather for `num_blocks` blocks of each sequence.

    Args:
        kv_pool: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
        block_tables: [sequences, max_blocks].
        first_blocks: [sequences]: entry of the block table to begin with.
        num_blocks: entries to gather; those past a table's end repeat its last.
    """
    _, num_layers, _, num_kv_heads, block_size, head_dim = kv_pool.shape
    sequences, max_blocks = block_tables.shape
    entries = first_blocks.unsqueeze(1) + torch.arange(num_blocks)
    blocks = block_tables.gather(1, entries.clamp(max=max_blocks - 1))
    rows_per_block = num_layers * 2 * num_kv_heads
    heads = torch.arange(2 * num_kv_heads).view(2, 1, num_kv_heads, 1)
    rows = blocks.view(1, sequences, 1, num_blocks) * rows_per_block + heads
    positions = (entries.unsqueeze(2) * block_size + torch.arange(block_size)).flatten(1)
    gathered = kv_pool.new_empty(2, sequences, num_kv_heads, num_blocks * block_size, head_dim)
    return PagedContext(rows.flatten(), positions, gathered)
