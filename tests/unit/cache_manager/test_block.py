from cache_manager.block import Block, Content, FreeQueue
from pagekeeper.common.ids import BlockId


def _block(block_id: int, *, cached: bool = False) -> Block:
    block = Block(BlockId(block_id))
    if cached:
        block.content = Content(bytes(36))
    return block


def _drain(queue: FreeQueue) -> list[int]:
    order = []
    while (block := queue.first()) is not None:
        queue.remove(block)
        order.append(block.id)
    return order


def test_uncached_blocks_are_granted_before_cached_ones() -> None:
    queue = FreeQueue()
    for block in (_block(1, cached=True), _block(2), _block(3, cached=True), _block(4)):
        queue.append(block)
    assert (queue.num_uncached, queue.num_cached, len(queue)) == (2, 2, 4)
    assert _drain(queue) == [2, 4, 1, 3]
    assert len(queue) == 0


def test_a_block_leaves_the_queue_from_wherever_it_stands() -> None:
    queue = FreeQueue()
    blocks = [_block(block_id, cached=True) for block_id in range(1, 6)]
    for block in blocks:
        queue.append(block)
    for index in (2, 0, 4):
        queue.remove(blocks[index])
    queue.append(blocks[2])
    assert _drain(queue) == [2, 4, 3]


def test_an_empty_queue_has_no_first_block() -> None:
    assert FreeQueue().first() is None
    assert list(FreeQueue()) == []
