"""Both clients against a gateway whose streams end where they should not: the answer is that of an unbroken stream."""

import asyncio
import itertools
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagekeeper import (
    BeamSearch,
    Candidate,
    Delta,
    DuplicateRequestError,
    OverloadedError,
    Resume,
    UnavailableError,
    Usage,
)
from pagekeeper.v1 import types_pb2
from tests.fakes.runner import answer_of
from tests.fakes.scripted_gateway import CURABLE_ENDS, PROMPT, SEED, Cut, ScriptedGateway, Story, text_of
from tests.unit.cli.fakes import serving
from tests.unit.client.adapters import ADAPTERS, Adapter

# Both end by themselves, the second one at once.
TWO = Story(lengths=(5, 2), stops=(True, True))
MESSAGES_OF_TWO = 6


@pytest.fixture(params=list(ADAPTERS))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def connect(kind: str, server: str, **options: Any) -> Adapter:
    """A client that does not wait between its attempts."""
    adapter: Adapter = ADAPTERS[kind](server, **options)
    adapter.client._route.rng = lambda: 0.0
    return adapter


async def answer_to(kind: str, gateway: ScriptedGateway, **options: Any) -> tuple[Any, list[Delta]]:
    """An answer, read to its end, and its deltas."""
    with serving(gateway=gateway) as address:
        client = connect(kind, address)
        answer = client.generate(PROMPT, **options)
        deltas = []
        while delta := await client.next(answer):
            deltas.append(delta)
        await client.close()
    return answer, deltas


def check_whole(story: Story, answer: Any, deltas: list[Delta]) -> None:
    """Each token once and in its place, the text continuous, each end once; as if there had been one stream."""
    by_candidate = defaultdict(list)
    for delta in deltas:
        by_candidate[delta.index].append(delta)
    for index, length in enumerate(story.lengths):
        mine = by_candidate[index]
        assert [token for delta in mine for token in delta.token_ids] == answer_of(SEED, PROMPT, length, index)
        sizes = itertools.accumulate((len(delta.token_ids) for delta in mine), initial=0)
        assert all(delta.position == place for delta, place in zip(mine, sizes, strict=False) if delta.token_ids)
        assert "".join(delta.text for delta in mine) == text_of(index, length, is_whole=True)
        ends = [delta.finish_reason for delta in mine if delta.finish_reason]
        assert ends == ["stop" if story.stops[index] else "length"]
        assert mine[-1].finish_reason
    assert answer.seed == SEED
    assert answer.usage.prompt_tokens == len(PROMPT)


@pytest.mark.parametrize("usage_alone", [False, True])
@pytest.mark.parametrize("sends_headers", [False, True])
@pytest.mark.parametrize("end", CURABLE_ENDS)
async def test_a_stream_may_end_at_any_boundary(kind: str, end: str, sends_headers: bool, usage_alone: bool) -> None:
    story = Story(TWO.lengths, TWO.stops, usage_alone=usage_alone)
    num_messages = MESSAGES_OF_TWO + usage_alone
    options = {"n": 2, "logprobs": 1, "echo": True}
    whole, _ = await answer_to(kind, ScriptedGateway(story), **options)
    for after in range(num_messages + 1):
        gateway = ScriptedGateway(story, [Cut(after, end, sends_headers)])
        answer, deltas = await answer_to(kind, gateway, **options)
        check_whole(story, answer, deltas)
        assert (answer.candidates, answer.prompt, answer.branch_text) == (
            whole.candidates,
            whole.prompt,
            whole.branch_text,
        )
        # All had come but the end of the stream.
        assert len(gateway.requests) == (1 if after == num_messages else 2)
        assert {request.request_id for request in gateway.requests} == {answer.request_id}


async def test_what_was_received_is_sent_along_for_each_candidate(kind: str) -> None:
    gateway = ScriptedGateway(TWO, [Cut(2), Cut(0), Cut(1)])
    answer, _ = await answer_to(kind, gateway, n=2, temperature=0.5)
    first, *others = gateway.requests
    assert not first.HasField("resume")
    received = [[list(candidate.token_ids) for candidate in request.resume.candidates] for request in others]
    known = [answer_of(SEED, PROMPT, 3), answer_of(SEED, PROMPT, 2, 1)]
    assert received == [[known[0][:2], known[1]], [known[0][:2], known[1]], known]
    ends = [[candidate.finish_reason for candidate in request.resume.candidates] for request in others]
    assert ends == [[0, 0]] * 2 + [[0, types_pb2.FINISH_REASON_STOP]]
    assert [request.resume.seed for request in others] == [SEED] * 3
    for request in others:
        request.ClearField("resume")
        assert request == first
    # As the last stream says.
    assert answer.usage == Usage(3, 2, 5, 0, 7)


async def test_a_lost_stream_of_which_nothing_has_come_is_taken_over(kind: str) -> None:
    gateway = ScriptedGateway(TWO, [Cut(0)])
    await answer_to(kind, gateway, n=2)
    assert [request.HasField("resume") for request in gateway.requests] == [False, True]
    assert not gateway.requests[1].resume.candidates


async def test_a_candidate_that_had_ended_keeps_its_end_whatever_comes_of_it_again(kind: str) -> None:
    story = Story(TWO.lengths, TWO.stops, rambles=True)
    answer, deltas = await answer_to(kind, ScriptedGateway(story, [Cut(4)]), n=2)
    check_whole(TWO, answer, deltas)


@pytest.mark.parametrize("rambles", [False, True])
async def test_an_answer_that_lacks_only_its_usage_is_asked_for_that_alone(kind: str, rambles: bool) -> None:
    story = Story(TWO.lengths, TWO.stops, rambles=rambles, usage_alone=True)
    gateway = ScriptedGateway(story, [Cut(MESSAGES_OF_TWO)])
    answer, deltas = await answer_to(kind, gateway, n=2)
    check_whole(TWO, answer, deltas)
    (again,) = gateway.requests[1:]
    assert [candidate.finish_reason for candidate in again.resume.candidates] == [types_pb2.FINISH_REASON_STOP] * 2


async def test_a_program_that_resumes_a_candidate_that_has_ended_gets_its_end_alone(kind: str) -> None:
    with serving(gateway=ScriptedGateway(TWO)) as address:
        client = connect(kind, address)
        answer = client.generate(PROMPT, n=2, resume=Resume(SEED, [answer_of(SEED, PROMPT, 5), []], ["stop"]))
        first, second = await client.collect(answer)
        assert first == Candidate(0, finish_reason="stop")
        assert second.token_ids == answer_of(SEED, PROMPT, 2, 1)
        assert not answer.received.finish_reasons
        await client.close()


@pytest.mark.parametrize("usage_alone", [False, True])
async def test_a_beam_search_starts_again_and_its_hypotheses_come_once(kind: str, usage_alone: bool) -> None:
    story = Story((4, 3), (True, True), usage_alone=usage_alone)
    options = {"n": 2, "beam_search": BeamSearch(width=2, intermediate=True)}
    for after in range(4 + 2 * usage_alone):
        gateway = ScriptedGateway(story, [Cut(after)])
        answer, deltas = await answer_to(kind, gateway, **options)
        check_whole(story, answer, deltas)
        assert [candidate.score for candidate in answer.candidates.values()] == [-1.0, -2.0]
        assert len(gateway.requests) == 2


async def test_a_beam_search_shows_its_beams_on(kind: str) -> None:
    gateway = ScriptedGateway(Story((4, 3), (True, True)), [Cut(2)])
    with serving(gateway=gateway) as address:
        client = connect(kind, address)
        answer = client.generate(PROMPT, n=2, beam_search=BeamSearch(width=2, intermediate=True))
        shown = await client.intermediate(answer)
        assert [len(beams[0].token_ids) for beams in shown] == [1, 2, 1, 2, 3]
        assert len(answer.candidates) == 2
        await client.close()


async def test_an_answer_in_one_message_is_asked_for_until_it_comes(kind: str) -> None:
    story = Story((1,), (False,))
    answer, deltas = await answer_to(kind, ScriptedGateway(story, [Cut(0)] * 3), stream=False)
    check_whole(story, answer, deltas)
    assert len(deltas) == 1


async def test_what_a_program_resumes_is_sent_along_again(kind: str) -> None:
    first, _ = await answer_to(kind, ScriptedGateway(TWO), n=2)
    gateway = ScriptedGateway(Story((7, 4), (True, True)), [Cut(1), Cut(0)])
    answer, deltas = await answer_to(kind, gateway, n=2, resume=first.received, request_id="mine")
    assert [(delta.index, delta.position) for delta in deltas if delta.token_ids] == [(0, 5), (1, 2), (0, 6), (1, 3)]
    assert answer.candidates[0].token_ids == answer_of(SEED, PROMPT, 7)[5:]
    assert [len(request.resume.candidates[0].token_ids) for request in gateway.requests] == [5, 6, 6]
    assert {request.request_id for request in gateway.requests} == {"mine"}


async def test_a_full_queue_is_waited_for_only_in_the_middle_of_an_answer(kind: str) -> None:
    story = Story((4,), (False,))
    answer, deltas = await answer_to(kind, ScriptedGateway(story, [Cut(1), Cut(0, "overloaded")]))
    check_whole(story, answer, deltas)
    with pytest.raises(OverloadedError):
        await answer_to(kind, ScriptedGateway(story, [Cut(0, "overloaded")]))


async def test_who_was_taken_over_does_not_take_over_in_turn(kind: str) -> None:
    with pytest.raises(DuplicateRequestError, match="taken over"):
        await answer_to(kind, ScriptedGateway(TWO, [Cut(1, "taken over")]), n=2)


async def test_who_was_taken_over_by_a_late_call_of_its_own_goes_on(kind: str) -> None:
    answer, deltas = await answer_to(kind, ScriptedGateway(TWO, [Cut(1), Cut(1, "taken over")]), n=2)
    check_whole(TWO, answer, deltas)
    answer, deltas = await answer_to(kind, ScriptedGateway(TWO, [Cut(0), Cut(0, "taken over")]), n=2)
    check_whole(TWO, answer, deltas)


async def test_when_the_time_is_up_the_last_error_says_how_much_had_come(kind: str) -> None:
    gateway = ScriptedGateway(TWO, [Cut(2, "draining"), *[Cut(0)] * 10_000])
    with serving(gateway=gateway) as address:
        client = connect(kind, address, resume_for_s=0.2)
        answer = client.generate(PROMPT, n=2)
        for _ in range(2):
            with pytest.raises(UnavailableError, match="broke after 4 tokens") as caught:
                await client.collect(answer)
            assert caught.value.tokens_emitted == 4
            del caught
        assert len(gateway.requests) > 2
        await client.close()


@pytest.mark.parametrize("kind", list(ADAPTERS))
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_any_cuts_leave_the_answer_as_it_is(kind: str, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 3), label="n")
    story = Story(
        lengths=data.draw(st.lists(st.integers(1, 6), min_size=n, max_size=n), label="lengths"),
        stops=data.draw(st.lists(st.booleans(), min_size=n, max_size=n), label="stops"),
        usage_alone=data.draw(st.booleans(), label="usage_alone"),
    )
    end = st.sampled_from(CURABLE_ENDS)
    cuts = data.draw(st.lists(st.builds(Cut, st.integers(0, 7), end, st.booleans()), max_size=6), label="cuts")
    gateway = ScriptedGateway(story, cuts)
    answer, deltas = asyncio.run(answer_to(kind, gateway, n=n, logprobs=0))
    check_whole(story, answer, deltas)
    for candidate in answer.candidates.values():
        assert candidate.cumulative_logprob == sum(token.logprob for token in candidate.logprobs)
        assert [token.token_id for token in candidate.logprobs] == candidate.token_ids
