"""A fork and its parent over real bytes, written as a runner writes them: copies first, then the new slot."""

from hashlib import sha256

import pytest
import torch

from kernels.interface import AttentionParams
from kernels.select import select_kernels
from model_runner.device import view_pool
from pagekeeper.common.operations import BlockRef, Extend, Extended, Fork
from tests.fakes.local_cache import TINY_LAYOUT, LocalCache, LocalPool, pool_bytes
from tests.fakes.policy_session import opening, tokens
from tests.paging import attention_batch

BLOCK_BYTES = TINY_LAYOUT.block_bytes


def _bytes(cache: LocalCache, blocks: list[BlockRef]) -> bytes:
    return b"".join(pool_bytes(cache)[block.id * BLOCK_BYTES : (block.id + 1) * BLOCK_BYTES] for block in blocks)


def _write(cache: LocalCache, block: BlockRef, content: bytes) -> None:
    pool_bytes(cache)[block.id * BLOCK_BYTES : (block.id + 1) * BLOCK_BYTES] = content


def test_case_24_writing_a_fork_leaves_the_parents_bytes_alone() -> None:
    """Case 24, the pool's part: fork mid-block, write the child."""
    cache = LocalPool(12).attach()
    cache.send(1, 0, [opening(1, tokens(1.5))])
    parent = cache.receive(0)[0].blocks
    for index, block in enumerate(parent):
        _write(cache, block, bytes([index + 1]) * BLOCK_BYTES)
    before = sha256(_bytes(cache, parent)).digest()

    cache.send(2, 1, [Fork(1, 12, [2]), Extend(2, 16), Extend(2, 24)])
    _, first, second = cache.receive(0)
    assert isinstance(first, Extended)
    (copy,) = first.copies
    child = [parent[0], copy.destination, *second.blocks]
    _write(cache, copy.destination, _bytes(cache, [copy.source]))
    assert sha256(_bytes(cache, child[:2])).digest() == before

    for block in child[1:]:
        _write(cache, block, b"\xff" * BLOCK_BYTES)
    assert sha256(_bytes(cache, parent)).digest() == before
    assert cache.pool.policy.check_integrity() == []


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_case_24_writing_a_fork_by_the_kernels_leaves_the_parents_bytes_alone(backend: str) -> None:
    """Case 24, with the copy kernel: fork mid-block, write the child; the child has the parent's first tokens."""
    cache = LocalPool(12).attach()
    kernels = select_kernels(backend)
    pool = view_pool(cache.memory, TINY_LAYOUT, cache.granted.num_blocks)

    def store(table: list[BlockRef], first: int, last: int) -> None:
        size = TINY_LAYOUT.block_size
        slots = [table[position // size].id * size + position % size for position in range(first, last)]
        num_tokens, head_dim = last - first, TINY_LAYOUT.head_dim
        batch = attention_batch(slots, [[block.id for block in table]], [num_tokens], [last])
        attention = kernels.prepare_attention(batch, pool, AttentionParams(0.5))
        for layer in range(TINY_LAYOUT.num_layers):
            qkv = torch.randn(num_tokens, 3 * TINY_LAYOUT.num_kv_heads, head_dim)
            attention.rotate_and_store(layer, qkv, torch.ones(num_tokens, head_dim), torch.zeros(num_tokens, head_dim))

    cache.send(1, 0, [opening(1, tokens(1.5))])
    parent = cache.receive(0)[0].blocks
    store(parent, 0, 12)
    before = sha256(_bytes(cache, parent)).digest()

    cache.send(2, 1, [Fork(1, 12, [2]), Extend(2, 20)])
    _, extended = cache.receive(0)
    (copy,) = extended.copies
    kernels.copy_blocks(pool, torch.tensor([[copy.source.id, copy.destination.id]]))
    child = [parent[0], copy.destination, *extended.blocks]
    assert torch.equal(pool.blocks[child[1].id, ..., :4, :], pool.blocks[parent[1].id, ..., :4, :])
    for position in range(12, 20):
        store(child, position, position + 1)
    assert sha256(_bytes(cache, parent)).digest() == before
    assert pool.blocks[child[1].id, ..., 4:, :].count_nonzero() > 0
    assert torch.equal(pool.blocks[child[1].id, ..., :4, :], pool.blocks[parent[1].id, ..., :4, :])
