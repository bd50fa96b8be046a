"""What a runner may rely on: the same tests against the real client and manager, and against the fake."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cache_manager.client import CacheClient, CacheConnectionLost, Exchange
from pagekeeper.common.operations import BlockRef, Extend, Extended, Opened, Refused, Release, Released, Seal, Shortage
from tests.fakes.local_cache import FINGERPRINT, TINY_LAYOUT, LocalPool, pool_bytes
from tests.fakes.manager import ManagerProcess
from tests.fakes.policy_session import opening, tokens

NUM_BLOCKS = 16
LIMIT_S = 20.0

Attach = Callable[[], Exchange]


@pytest.fixture(params=["process", "local"])
def attach(request: pytest.FixtureRequest, runtime_dir: Path) -> Iterator[Attach]:
    """Makes exchanges with one and the same pool."""
    if request.param == "local":
        pool = LocalPool(NUM_BLOCKS)
        yield pool.attach
        assert pool.policy.check_integrity() == []
        return
    with ManagerProcess(runtime_dir, "--pool-size", str(NUM_BLOCKS * TINY_LAYOUT.block_bytes)) as manager:
        yield lambda: CacheClient.connect(manager.runtime_dir, "runner", TINY_LAYOUT, FINGERPRINT, LIMIT_S)
        assert list(manager.audit().violations) == []


@pytest.fixture
def exchange(attach: Attach) -> Iterator[Exchange]:
    made = attach()
    yield made
    made.close()


def test_the_session_is_described(exchange: Exchange) -> None:
    granted = exchange.granted
    assert (granted.num_blocks, granted.block_bytes) == (NUM_BLOCKS, TINY_LAYOUT.block_bytes)
    assert granted.watermark_blocks == 1
    assert granted.epoch == 1
    assert granted.start_id
    assert exchange.memory.size == len(pool_bytes(exchange)) >= NUM_BLOCKS * TINY_LAYOUT.block_bytes


def test_results_come_in_the_order_of_the_messages(exchange: Exchange) -> None:
    exchange.send(1, 0, [opening(1, tokens(1)), opening(2, tokens(1, base=50))])
    exchange.send(2, 1, [Extend(1, 9)])
    exchange.send(3, 2, [])
    assert exchange.receive(LIMIT_S) == [Opened(0, [BlockRef(1, 1)]), Opened(0, [BlockRef(2, 1)])]
    assert exchange.receive(LIMIT_S) == [Extended(1, [BlockRef(3, 1)])]
    assert exchange.receive(LIMIT_S) == []


def test_shortage_and_refusal_are_values(exchange: Exchange) -> None:
    exchange.send(1, 0, [opening(1, tokens(10)), opening(2, tokens(10)), Extend(7, 1), Release(2), Release(1)])
    opened, short, refused, *released = exchange.receive(LIMIT_S)
    assert isinstance(opened, Opened)
    assert short == Shortage(11, 5, 0)
    assert isinstance(refused, Refused)
    assert released == [Released(), Released()]


def test_waiting_for_an_answer_that_is_not_due_times_out(exchange: Exchange) -> None:
    with pytest.raises(TimeoutError):
        exchange.receive(0.01)
    exchange.send(1, 0, [])
    assert exchange.receive(LIMIT_S) == []


def test_two_sessions_share_memory_and_sealed_blocks(attach: Attach) -> None:
    one, two = attach(), attach()
    one.send(1, 0, [opening(1, tokens(1))])
    (opened,) = one.receive(LIMIT_S)
    start = opened.blocks[0].id * one.granted.block_bytes
    pool_bytes(one)[start : start + 5] = b"bytes"
    one.send(2, 1, [Seal(1, tokens(1), opened.blocks)])
    one.receive(LIMIT_S)
    two.send(1, 0, [opening(9, tokens(2))])
    (hit,) = two.receive(LIMIT_S)
    assert hit.num_cached_tokens == 8
    start = hit.blocks[0].id * two.granted.block_bytes
    assert pool_bytes(two)[start : start + 5] == b"bytes"
    one.close()
    two.close()


def test_a_message_out_of_order_loses_the_session(exchange: Exchange) -> None:
    exchange.send(5, 4, [opening(1, tokens(1))])
    assert isinstance(exchange.receive(LIMIT_S)[0], Opened)
    exchange.send(4, 4, [])
    with pytest.raises(CacheConnectionLost):
        exchange.receive(LIMIT_S)
    with pytest.raises(CacheConnectionLost):
        exchange.receive(LIMIT_S)
    with pytest.raises(CacheConnectionLost):
        exchange.send(5, 5, [])


def test_reattaching_begins_anew_over_the_same_memory(exchange: Exchange) -> None:
    memory, epoch = exchange.memory, exchange.granted.epoch
    exchange.send(1, 0, [opening(1, tokens(1.5))])
    (opened,) = exchange.receive(LIMIT_S)
    exchange.send(2, 1, [Seal(1, tokens(1), opened.blocks[:1])])
    exchange.receive(LIMIT_S)
    exchange.reattach(LIMIT_S)
    assert exchange.granted.epoch > epoch
    assert exchange.memory is memory
    exchange.send(1, 0, [opening(1, tokens(1.5))])
    assert exchange.receive(LIMIT_S) == [Opened(8, [BlockRef(1, 1), BlockRef(3, 1)])]


def test_a_lost_session_can_be_replaced(exchange: Exchange) -> None:
    exchange.send(5, 4, [])
    exchange.receive(LIMIT_S)
    exchange.send(4, 4, [])
    with pytest.raises(CacheConnectionLost):
        exchange.receive(LIMIT_S)
    exchange.reattach(LIMIT_S)
    exchange.send(1, 0, [opening(1, tokens(1))])
    assert isinstance(exchange.receive(LIMIT_S)[0], Opened)


def test_after_closing_everything_is_lost_and_free(attach: Attach) -> None:
    one, two = attach(), attach()
    one.send(1, 0, [opening(1, tokens(14))])
    assert isinstance(one.receive(LIMIT_S)[0], Opened)
    one.close()
    one.close()
    for use in (lambda: one.send(2, 1, []), lambda: one.receive(LIMIT_S), lambda: one.reattach(LIMIT_S)):
        with pytest.raises(CacheConnectionLost):
            use()
    deadline = time.monotonic() + LIMIT_S
    result, step = None, 0
    while not isinstance(result, Opened) and time.monotonic() < deadline:
        step += 1
        two.send(step, step - 1, [opening(1, tokens(14))])
        (result,) = two.receive(LIMIT_S)
    assert isinstance(result, Opened)
    two.close()
