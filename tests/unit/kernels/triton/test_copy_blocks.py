"""Block copies: every byte of a block and none beside it, wherever the block lies."""

import mmap
import os
import random

import pytest
import torch

from kernels.kv_layout import KvLayout
from kernels.kv_pool import KvPool
from kernels.triton.copy_blocks import copy_blocks
from model_runner.device import view_pool
from pagekeeper.common.operations import Extend, Fork
from tests.fakes.local_cache import TINY_LAYOUT, LocalPool
from tests.fakes.policy_session import opening, tokens

LAYOUTS = [
    KvLayout(1, 1, 8, 1, "float8_e4m3fn"),  # 48 bytes, the fewest of all
    KvLayout(2, 3, 8, 5, "float16"),
    KvLayout(1, 2, 16, 64, "float32"),
    KvLayout(3, 2, 32, 80, "bfloat16"),  # several programs, the last one partly filled
    KvLayout(2, 2, 16, 96, "float8_e4m3fn"),
]


def random_pool(layout: KvLayout, num_blocks: int) -> KvPool:
    generator = torch.Generator().manual_seed(0)
    size = num_blocks * layout.block_bytes
    return KvPool.over(torch.randint(0, 256, (size,), generator=generator).to(torch.uint8), layout, num_blocks)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_all_copies_of_a_step_leave_every_other_block_alone(layout: KvLayout) -> None:
    pool = random_pool(layout, 24)
    blocks = random.Random(1).sample(range(24), 24)
    # One source may have several destinations.
    copies = [(blocks[0], blocks[9]), *zip(blocks[:8], blocks[10:18], strict=True)]
    expected = pool.raw.clone()
    for source, destination in copies:
        expected[destination] = pool.raw[source]
    copy_blocks(pool, torch.tensor(copies))
    assert torch.equal(pool.raw, expected)


def test_no_copies_are_no_work() -> None:
    pool = random_pool(LAYOUTS[2], 2)
    before = pool.raw.clone()
    copy_blocks(pool, torch.empty(0, 2, dtype=torch.int64))
    assert torch.equal(pool.raw, before)


def test_case_03_blocks_beyond_two_gibibytes_are_copied() -> None:
    """Case 3: blocks whose offset in bytes, and in elements of four bytes, passes 2³¹."""
    layout = KvLayout(1, 2, 16, 64, "float32")
    high = 2**33 // layout.block_bytes + 1
    num_blocks = high + 2
    descriptor = os.memfd_create("sparse-pool")
    os.ftruncate(descriptor, num_blocks * layout.block_bytes)  # only the pages that are touched exist
    memory = mmap.mmap(descriptor, num_blocks * layout.block_bytes)
    os.close(descriptor)
    pool = KvPool.over(torch.frombuffer(memory, dtype=torch.uint8), layout, num_blocks)
    pool.raw[1] = torch.arange(layout.block_bytes).to(torch.uint8)
    copy_blocks(pool, torch.tensor([(1, high)]))
    copy_blocks(pool, torch.tensor([(high, high + 1)]))
    assert torch.equal(pool.raw[high], pool.raw[1])
    assert torch.equal(pool.raw[high + 1], pool.raw[1])
    assert pool.raw[high - 1].count_nonzero() == 0


def test_case_24_writing_a_fork_that_the_kernel_copied_leaves_the_parents_bytes_alone() -> None:
    """Case 24, with the copy kernel on a pool that the manager granted: fork mid-block, copy, write the child."""
    cache = LocalPool(12).attach()
    pool = view_pool(cache.memory, TINY_LAYOUT, cache.granted.num_blocks)
    cache.send(1, 0, [opening(1, tokens(1.5))])
    parent = [block.id for block in cache.receive(0)[0].blocks]
    pool.blocks[parent] = torch.randn(len(parent), *TINY_LAYOUT.block_shape)
    before = pool.raw[parent].clone()

    cache.send(2, 1, [Fork(1, 12, [2]), Extend(2, 20)])
    (copy,) = cache.receive(0)[1].copies
    copy_blocks(pool, torch.tensor([[copy.source.id, copy.destination.id]]))
    assert copy.source.id in parent
    assert torch.equal(pool.raw[copy.destination.id], pool.raw[copy.source.id])
    pool.blocks[copy.destination.id, ..., 4:, :] = 0
    assert torch.equal(pool.raw[parent], before)
