"""The state of an answer, whoever reads its messages."""

import math
from typing import Any

import pytest

from pagekeeper import Beam, BeamSearch, BugError, Candidate, GivenPrompt, Resume, TokenLogprobs, Usage
from pagekeeper.client.attempts import Attempts, Route
from pagekeeper.client.requests import generate_request
from pagekeeper.client.responses import BaseAnswer, first_text
from pagekeeper.v1 import generate_pb2, types_pb2


def answer(resume: Resume | None = None, **sampling: Any) -> BaseAnswer:
    request = generate_request(
        "x", model="", request_id="mine", stream=True, priority=0, resume=resume, sampling=sampling
    )
    return BaseAnswer(request, Attempts(Route("server"), timeout_s=None, resume_for_s=60.0))


def response(position: int, token_ids: list[int], text: str, index: int = 0, finish: int = 0, **fields: Any) -> Any:
    delta = generate_pb2.CandidateDelta(
        index=index, position=position, token_ids=token_ids, text=text, finish_reason=finish
    )
    return generate_pb2.GenerateResponse(deltas=[delta], request_id="mine", **fields)


def test_the_first_message_brings_the_seed_and_the_last_one_usage() -> None:
    growing = answer()
    assert (growing.request_id, growing.seed, growing.usage) == ("mine", None, None)
    growing._take(response(0, [5], "Par", seed=2**63))
    assert (growing.seed, growing.usage) == (2**63, None)
    usage = types_pb2.Usage(
        prompt_tokens=9, cached_tokens=8, resumed_tokens=7, recomputed_tokens=6, completion_tokens=2
    )
    growing._take(response(1, [6], "is", finish=types_pb2.FINISH_REASON_STOP, usage=usage))
    assert growing.usage == Usage(9, 8, 7, 6, 2)
    assert growing.candidates == {0: Candidate(0, "Paris", [5, 6], "stop")}


def test_candidates_grow_side_by_side_and_are_given_in_order() -> None:
    growing = answer()
    growing._take(response(0, [5], "b", index=1, finish=types_pb2.FINISH_REASON_LENGTH, seed=1))
    assert first_text(growing._in_order()) == "b"
    growing._take(response(0, [6], "a", index=0))
    assert growing._in_order() == [Candidate(0, "a", [6]), Candidate(1, "b", [5], "length")]
    assert growing.received == Resume(1, [[6], [5]], [None, "length"])


def test_logprobs_grow_with_the_tokens_and_their_sum_comes_with_the_end() -> None:
    growing = answer()
    first = types_pb2.TokenLogprobs(token_id=5, logprob=-0.5, rank=1, top_token_ids=[5, 9], top_logprobs=[-0.5, -1.5])
    second = types_pb2.TokenLogprobs(token_id=6, logprob=-math.inf, rank=400)
    for position, token in enumerate((first, second)):
        message = response(position, [token.token_id], "x", finish=position)
        message.deltas[0].logprobs.append(token)
        if position:
            message.deltas[0].cumulative_logprob = -math.inf
        growing._take(message)
    (candidate,) = growing._in_order()
    assert candidate.logprobs == [TokenLogprobs(5, -0.5, 1, {5: -0.5, 9: -1.5}), TokenLogprobs(6, -math.inf, 400, {})]
    assert (candidate.cumulative_logprob, candidate.score) == (-math.inf, None)
    assert growing._pending[0].logprobs == candidate.logprobs[:1]


def test_the_prompt_the_branch_and_the_beams_are_kept_as_they_came_last() -> None:
    growing = answer()
    assert (growing.prompt, growing.branch_text, growing.beams) == (None, "", [])
    given = generate_pb2.Prompt(token_ids=[5, 6], text="hi", logprobs=[types_pb2.TokenLogprobs(token_id=6, rank=1)])
    growing._take(generate_pb2.GenerateResponse(prompt=given, branch_text="i", seed=1))
    assert growing.prompt == GivenPrompt([5, 6], "hi", [None, TokenLogprobs(6, 0.0, 1, {})])
    assert growing.branch_text == "i"
    for token_id in (7, 8):
        beam = generate_pb2.Beam(token_ids=[token_id], text="x", score=-1.0)
        growing._take(generate_pb2.GenerateResponse(beams=[beam]))
        assert growing.beams == [Beam([token_id], "x", -1.0)]
    growing._take(response(0, [8], "x", finish=1))
    assert growing.beams == [Beam([8], "x", -1.0)]


def test_an_empty_answer_has_no_text() -> None:
    assert first_text(answer()._in_order()) == ""


def test_a_reason_that_only_newer_servers_know_ends_the_candidate_all_the_same() -> None:
    growing = answer()
    growing._take(response(0, [5], "a", finish=77))
    assert growing.candidates[0].finish_reason == "other"


def test_what_was_received_counts_what_was_resumed_and_nothing_is_known_before() -> None:
    assert answer().received is None
    growing = answer(Resume(seed=3, token_ids=[[1, 2], [4]]))
    assert growing.received == Resume(3, [[1, 2], [4]], [None, None])
    growing._take(response(2, [9], "c", seed=3))
    assert growing.received == Resume(3, [[1, 2, 9], [4]], [None, None])
    assert growing.candidates == {0: Candidate(0, "c", [9])}
    assert growing._tokens_received() == 4


def test_tokens_of_a_later_candidate_alone_keep_their_place() -> None:
    growing = answer()
    growing._take(response(0, [5], "b", index=2, seed=1))
    assert growing.received == Resume(1, [[], [], [5]], [None] * 3)


def test_a_whole_answer_may_be_gone_on_with_beyond_its_end() -> None:
    growing = answer()
    growing._take(response(0, [5], "a", finish=types_pb2.FINISH_REASON_LENGTH, seed=1))
    assert growing.received == Resume(1, [[5]], ["length"])
    growing._take(generate_pb2.GenerateResponse(usage=types_pb2.Usage(completion_tokens=1)))
    assert growing.received == Resume(1, [[5]], [])


def test_a_candidate_that_had_ended_when_it_was_resumed_says_no_more() -> None:
    growing = answer(Resume(seed=3, token_ids=[[1, 2], [4]], finish_reasons=["length"]))
    assert growing.candidates == {0: Candidate(0, finish_reason="length")}
    growing._take(response(2, [], "held back", seed=3, finish=types_pb2.FINISH_REASON_STOP))
    assert not growing._pending
    assert growing.received == Resume(3, [[1, 2], [4]], ["length", None])


def test_an_end_for_a_reason_that_only_newer_servers_know_is_not_sent_back() -> None:
    growing = answer()
    growing._take(response(0, [5], "a", finish=77, seed=1))
    assert growing.received == Resume(1, [[5]], ["other"])
    assert [candidate.finish_reason for candidate in growing._next_request().resume.candidates] == [0]


def test_what_is_asked_for_again_is_what_has_not_come() -> None:
    growing = answer(n=2, temperature=0)
    assert growing._next_request() is growing._request
    growing._take(response(0, [5], "a", seed=3))
    growing._take(response(0, [6, 7], "b", index=1, finish=1))
    rest = growing._next_request()
    assert (rest.request_id, rest.sampling, rest.resume.seed) == ("mine", growing._request.sampling, 3)
    candidates = [(c.index, list(c.token_ids), c.finish_reason) for c in rest.resume.candidates]
    assert candidates == [(0, [5], 0), (1, [6, 7], types_pb2.FINISH_REASON_STOP)]


def test_a_request_that_may_be_live_is_taken_over_though_nothing_has_come_of_it() -> None:
    growing = answer()
    growing._attempts.may_be_live = True
    assert growing._next_request().HasField("resume")
    assert growing._next_request().resume == generate_pb2.Resume()


def test_a_beam_search_starts_again_without_tokens() -> None:
    growing = answer(beam_search=BeamSearch(width=2), n=2)
    growing._take(response(0, [5, 6], "a", finish=1, seed=3))
    assert growing.received == Resume(3, [])
    assert growing._next_request().resume == generate_pb2.Resume(seed=3)


def test_what_comes_again_of_a_candidate_that_has_ended_is_left_out() -> None:
    growing = answer(n=2)
    growing._take(response(0, [5], "a", finish=1, seed=1))
    growing._take(response(0, [6], "b", index=1))
    known = [Candidate(0, "a", [5], "stop"), Candidate(1, "b", [6])]
    growing._take(response(1, [9], "x"))
    growing._take(response(2, [], "y", finish=2))
    assert growing._in_order() == known
    assert len(growing._pending) == 2


def test_tokens_that_do_not_continue_what_has_come_are_a_fault_of_the_server() -> None:
    for position in (0, 2):
        growing = answer()
        growing._take(response(0, [5], "a", seed=1))
        with pytest.raises(BugError, match=f"at position 1, but the server went on at {position}"):
            growing._take(response(position, [6], "b"))


def test_the_sum_of_the_logprobs_is_that_of_the_whole_answer() -> None:
    growing = answer(logprobs=0)
    for position in range(3):
        message = response(position, [5], "x", finish=int(position == 2), seed=1 if position == 0 else None)
        message.deltas[0].logprobs.add(token_id=5, logprob=-0.25, rank=1)
        if position == 2:
            message.deltas[0].cumulative_logprob = -0.25  # of a stream that began with the last token
        growing._take(message)
    assert growing.candidates[0].cumulative_logprob == -0.75
    assert growing._pending[-1].cumulative_logprob == -0.75


def test_a_prompt_that_comes_again_is_left_out() -> None:
    growing = answer(echo=True)
    for text in ("first", "again"):
        growing._take(generate_pb2.GenerateResponse(prompt=generate_pb2.Prompt(text=text), seed=1))
    assert growing.prompt == GivenPrompt([], "first", [])
