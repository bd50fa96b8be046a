"""A fork and its parent over real bytes, written as a runner writes them: copies first, then the new slot."""

from hashlib import sha256

from pagekeeper.common.operations import BlockRef, Extend, Extended, Fork
from tests.fakes.local_cache import TINY_LAYOUT, LocalCache, LocalPool
from tests.fakes.policy_session import opening, tokens

BLOCK_BYTES = TINY_LAYOUT.block_bytes


def _bytes(cache: LocalCache, blocks: list[BlockRef]) -> bytes:
    return b"".join(cache.memory[block.id * BLOCK_BYTES : (block.id + 1) * BLOCK_BYTES] for block in blocks)


def _write(cache: LocalCache, block: BlockRef, content: bytes) -> None:
    cache.memory[block.id * BLOCK_BYTES : (block.id + 1) * BLOCK_BYTES] = content


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
