"""What waits for a client, what an attempt may add, and who is live."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from gateway.finish_reason import FinishReason
from gateway.generation import CacheUse, Generation, ResolvedRequest
from gateway.live_requests import LiveRequest, LiveRequests
from gateway.sampling import Sampling
from gateway.token_stream import Beam, News, Tokens, TokenStream
from pagekeeper.common.errors import BugError, DuplicateRequestError, SlowReaderError, UnavailableError
from pagekeeper.v1.runner_pb2 import SequenceOutput, StepOutput
from pagekeeper.v1.types_pb2 import TokenLogprobs


def generation(request_id: str = "r", tenant: str = "default", **sampling: Any) -> Generation:
    return Generation(ResolvedRequest(request_id, tenant, [5, 6], Sampling(100, **sampling), 1, 100))


def news(token_ids: list[int], finish_reason: FinishReason | None = None) -> News:
    return News([Tokens(0, token_ids, finish_reason)])


async def test_tokens_that_wait_become_one_message() -> None:
    stream = TokenStream()
    stream.push(Tokens(0, [1, 2]))
    stream.push(Tokens(0, [3], FinishReason.LENGTH))
    assert await stream.next() == news([1, 2, 3], FinishReason.LENGTH)


async def test_candidates_wait_side_by_side_and_end_one_by_one() -> None:
    stream = TokenStream(range(3))
    stream.push(Tokens(1, [1]))
    stream.push(Tokens(0, [2], FinishReason.STOP))
    stream.push(Tokens(1, [3]))
    assert (await stream.next()).tokens == [Tokens(1, [1, 3]), Tokens(0, [2], FinishReason.STOP)]
    stream.push(Tokens(1, [4], FinishReason.LENGTH))
    assert not stream.has_ended
    stream.push(Tokens(2, [5], FinishReason.LENGTH))
    assert stream.has_ended


async def test_what_waits_of_a_candidate_that_the_reader_closes_is_dropped() -> None:
    stream = TokenStream(range(2))
    told: list[str] = []
    stream.when_ended(lambda: told.append("ended"))
    stream.push(Tokens(0, [1]))
    stream.push(Tokens(1, [2], FinishReason.STOP))
    stream.close(0)
    assert told == ["ended"]
    assert (await stream.next()).tokens == [Tokens(1, [2], FinishReason.STOP)]


async def test_beams_that_wait_are_replaced_and_those_read_do_not_come_again() -> None:
    stream = TokenStream()
    for token_id in (1, 2):
        stream.push_beams([Beam([token_id], -1.0)])
    assert (await stream.next()).beams == [Beam([2], -1.0)]
    stream.push(Tokens(0, [1], FinishReason.STOP))
    assert (await stream.next()).beams is None


async def test_a_reader_waits_for_the_next_tokens() -> None:
    stream = TokenStream()
    reader = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    assert not reader.done()
    stream.push(Tokens(0, [1]))
    assert await reader == news([1])


async def test_a_failure_comes_after_the_tokens_before_it_and_stays() -> None:
    stream = TokenStream()
    stream.push(Tokens(0, [1]))
    stream.fail(UnavailableError("first"))
    stream.fail(UnavailableError("second"))
    assert await stream.next() == news([1])
    for _ in range(2):
        with pytest.raises(UnavailableError, match="first"):
            await stream.next()


async def test_only_many_tokens_left_unread_for_long_are_a_stall() -> None:
    now = 0.0
    stream = TokenStream(range(2), clock=lambda: now)
    stream.push(Tokens(0, [1] * 6))
    stream.push(Tokens(1, [1] * 5))
    now = 60.0
    assert not stream.is_stalled(10, 60.0)
    now = 60.1
    assert stream.is_stalled(10, 60.0)
    assert not stream.is_stalled(11, 60.0)
    await stream.next()
    stream.push(Tokens(0, [1] * 11))
    assert not stream.is_stalled(10, 60.0)


async def test_what_is_left_unread_when_nothing_more_comes_is_a_stall_however_little_it_is() -> None:
    now = 0.0
    streams = [TokenStream(clock=lambda: now) for _ in range(3)]
    streams[0].push(Tokens(0, [1], FinishReason.LENGTH))
    streams[1].fail(UnavailableError("gone"))
    streams[2].push(Tokens(0, [1]))
    now = 60.1
    assert [stream.is_stalled(10, 60.0) for stream in streams] == [True, True, False]


async def test_a_whole_answer_left_unread_is_never_an_error() -> None:
    stream = TokenStream()
    stream.push(Tokens(0, [1], FinishReason.STOP))
    stream.fail(UnavailableError("too late"))
    assert await stream.next() == news([1], FinishReason.STOP)


@pytest.mark.parametrize("end", [lambda s: s.push(Tokens(0, [2], FinishReason.STOP)), lambda s: s.fail(BugError("x"))])
async def test_the_end_of_a_stream_is_told_before_it_is_read(end: Callable[[TokenStream], None]) -> None:
    stream = TokenStream()
    told: list[str] = []
    stream.when_ended(lambda: told.append("ended"))
    stream.push(Tokens(0, [1]))
    assert not told
    end(stream)
    assert told == ["ended"]


async def test_positions_already_here_are_dropped_and_a_gap_is_a_bug() -> None:
    answer = generation(logprobs=0)

    def accept(position: int, *token_ids: int) -> None:
        logprobs = [TokenLogprobs(token_id=token_id) for token_id in token_ids]
        answer.accept(position, Tokens(0, list(token_ids), logprobs=logprobs))

    accept(0, 7, 8, 9)
    accept(1, 8, 9, 10)
    accept(1, 8)
    assert answer.token_ids == {0: [7, 8, 9, 10]}
    (tokens,) = (await answer.stream.next()).tokens
    assert tokens.token_ids == [token.token_id for token in tokens.logprobs] == [7, 8, 9, 10]
    with pytest.raises(BugError, match="from position 4 to 5"):
        accept(5, 11)


async def test_logprobs_that_wait_hold_no_part_of_a_runners_message() -> None:
    stream = TokenStream()
    for token_id in (5, 6):
        step = StepOutput(outputs=[SequenceOutput(logprobs=[TokenLogprobs(token_id=token_id)])])
        stream.push(Tokens(0, [token_id], logprobs=step.outputs[0].logprobs))
        # A part of it would show this.
        step.outputs[0].logprobs[0].token_id = 99
    (tokens,) = (await stream.next()).tokens
    assert [token.token_id for token in tokens.logprobs] == tokens.token_ids == [5, 6]


def test_what_a_runner_leaves_out_or_makes_up_is_a_bug() -> None:
    with pytest.raises(BugError, match="candidate 2"):
        generation(n=2).accept(0, Tokens(2, [5]))
    with pytest.raises(BugError, match="0 logprobs of 1"):
        generation(logprobs=1).accept(0, Tokens(0, [5]))
    with pytest.raises(BugError, match="before it has sent the prompt's"):
        generation(prompt_logprobs=0).accept(0, Tokens(0, [5]))
    with pytest.raises(BugError, match="2 prompt logprobs, not 1"):
        generation(prompt_logprobs=0).accept_prompt_logprobs([TokenLogprobs()] * 2)


async def test_the_prompts_logprobs_come_once_with_the_first_tokens() -> None:
    answer = generation(prompt_logprobs=0)
    for _ in range(2):
        answer.accept_prompt_logprobs([TokenLogprobs(token_id=6)])
    assert not answer.stream._changed.is_set()
    answer.accept(0, Tokens(0, [5]))
    assert (await answer.stream.next()).prompt_logprobs == [TokenLogprobs(token_id=6)]
    answer.accept(0, Tokens(0, [5], FinishReason.STOP))
    assert (await answer.stream.next()).prompt_logprobs is None


def test_a_candidate_that_has_ended_takes_nothing_more() -> None:
    answer = generation(n=2)
    answer.accept(0, Tokens(0, [5], FinishReason.STOP))
    answer.stream.close(1)
    for candidate in (0, 1):
        answer.accept(0, Tokens(candidate, [5, 6]))
    assert answer.token_ids == {0: [5], 1: []}


def test_what_was_cached_is_the_first_report_and_what_was_recomputed_their_sum() -> None:
    answer = generation()
    for attempt, (cached, recomputed) in enumerate([(16, 0), (48, 5)], start=1):
        answer.attempt = attempt
        answer.count(0, CacheUse(cached, recomputed))
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
    slow.generation.stream.push(Tokens(0, [1, 2]))
    live.end_slow_readers(max_tokens=1, max_seconds=-1.0)
    assert live.emptied.is_set()
    assert await slow.generation.stream.next() == news([1, 2])
    with pytest.raises(SlowReaderError):
        await slow.generation.stream.next()
