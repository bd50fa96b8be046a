"""What waits for a client, what an attempt may add, and who is live."""

import asyncio
from collections.abc import Callable

import pytest

from gateway.finish_reason import FinishReason
from gateway.generation import Generation, ResolvedRequest
from gateway.live_requests import LiveRequest, LiveRequests
from gateway.token_stream import Tokens, TokenStream
from gateway.validation import Sampling
from pagekeeper.common.errors import BugError, DuplicateRequestError, SlowReaderError, UnavailableError


def generation(request_id: str = "r", tenant: str = "default") -> Generation:
    sampling = Sampling(0.0, 1.0, 0, 0.0, 1, 100, (), frozenset(), ignore_eos=False)
    return Generation(ResolvedRequest(request_id, tenant, [5, 6], sampling, 1, 100, frozenset(), 0), [])


async def test_tokens_that_wait_become_one_message() -> None:
    stream = TokenStream()
    stream.push([1, 2])
    stream.push([3], FinishReason.LENGTH)
    assert await stream.next() == Tokens([1, 2, 3], FinishReason.LENGTH)


async def test_a_reader_waits_for_the_next_tokens() -> None:
    stream = TokenStream()
    reader = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    assert not reader.done()
    stream.push([1])
    assert await reader == Tokens([1], None)


async def test_a_failure_comes_after_the_tokens_before_it_and_stays() -> None:
    stream = TokenStream()
    stream.push([1])
    stream.fail(UnavailableError("first"))
    stream.fail(UnavailableError("second"))
    assert (await stream.next()).token_ids == [1]
    for _ in range(2):
        with pytest.raises(UnavailableError, match="first"):
            await stream.next()


async def test_only_many_tokens_left_unread_for_long_are_a_stall() -> None:
    now = 0.0
    stream = TokenStream(clock=lambda: now)
    stream.push([1] * 11)
    now = 60.0
    assert not stream.is_stalled(10, 60.0)
    now = 60.1
    assert stream.is_stalled(10, 60.0)
    assert not stream.is_stalled(11, 60.0)
    await stream.next()
    stream.push([1] * 11)
    assert not stream.is_stalled(10, 60.0)


async def test_what_is_left_unread_when_nothing_more_comes_is_a_stall_however_little_it_is() -> None:
    now = 0.0
    streams = [TokenStream(clock=lambda: now) for _ in range(3)]
    streams[0].push([1], FinishReason.LENGTH)
    streams[1].fail(UnavailableError("gone"))
    streams[2].push([1])
    now = 60.1
    assert [stream.is_stalled(10, 60.0) for stream in streams] == [True, True, False]


async def test_a_whole_answer_left_unread_is_never_an_error() -> None:
    stream = TokenStream()
    stream.push([1], FinishReason.STOP)
    stream.fail(UnavailableError("too late"))
    assert await stream.next() == Tokens([1], FinishReason.STOP)


@pytest.mark.parametrize("end", [lambda s: s.push([2], FinishReason.STOP), lambda s: s.fail(BugError("x"))])
async def test_the_end_of_a_stream_is_told_before_it_is_read(end: Callable[[TokenStream], None]) -> None:
    stream = TokenStream()
    told: list[str] = []
    stream.when_ended(lambda: told.append("ended"))
    stream.push([1])
    assert not told
    end(stream)
    assert told == ["ended"]


async def test_positions_already_here_are_dropped_and_a_gap_is_a_bug() -> None:
    answer = generation()
    answer.accept(0, [7, 8, 9], None)
    answer.accept(1, [8, 9, 10], None)
    answer.accept(1, [8], None)
    assert answer.token_ids == [7, 8, 9, 10]
    assert (await answer.stream.next()).token_ids == [7, 8, 9, 10]
    with pytest.raises(BugError, match="from position 4 to 5"):
        answer.accept(5, [11], None)


def test_what_was_cached_is_the_first_report_and_what_was_recomputed_their_sum() -> None:
    answer = generation()
    for attempt, (cached, recomputed) in enumerate([(16, 0), (48, 5)], start=1):
        answer.attempt = attempt
        answer.count(cached, recomputed)
    assert answer.cached_tokens == 16
    assert sum(answer.recomputed_tokens.values()) == 5


def test_case_15_a_live_request_is_found_by_its_id_and_not_by_another_tenants() -> None:
    """Case 15: a duplicate is known by tenant and id; another tenant's same id does not clash."""
    live = LiveRequests()
    first = LiveRequest(generation())
    live.enter(first)
    live.enter(LiveRequest(generation(tenant="other")))
    assert live.find("default", "r") is first
    assert live.find("third", "r") is None
    first.release.close()
    assert live.find("default", "r") is None


async def test_a_resumed_request_ends_the_stream_it_takes_over() -> None:
    live = LiveRequests()
    older, newer = LiveRequest(generation()), LiveRequest(generation())
    released: list[str] = []
    live.enter(older)
    older.release.callback(released.append, "older")
    live.enter(newer)
    assert released == ["older"]
    with pytest.raises(DuplicateRequestError, match="taken over"):
        await older.generation.stream.next()
    older.release.close()  # its handler notices later; the newer one stays
    assert live.find("default", "r") is newer
    newer.release.close()
    assert live.emptied.is_set()


async def test_a_slow_reader_is_ended_and_gives_everything_back() -> None:
    live = LiveRequests()
    slow = LiveRequest(generation())
    live.enter(slow)
    slow.generation.stream.push([1, 2])
    live.end_slow_readers(max_tokens=1, max_seconds=-1.0)
    assert live.emptied.is_set()
    assert (await slow.generation.stream.next()).token_ids == [1, 2]
    with pytest.raises(SlowReaderError):
        await slow.generation.stream.next()
