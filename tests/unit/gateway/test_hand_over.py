"""One runner makes the first tokens and another the rest, decided without either."""

import pytest

from gateway.finish_reason import FinishReason
from gateway.fleet import Role
from gateway.generation import CacheUse
from gateway.sampling import BeamSearch
from gateway.token_stream import Beam, Tokens
from pagekeeper.v1.types_pb2 import EARLY_STOPPING_FALSE, TokenLogprobs
from tests.fakes.router import FakeLink, Rig, failure, taken

BOTH, PREFILL, DECODE = Role.BOTH, Role.PREFILL, Role.DECODE
LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


class Pair(Rig):
    """A runner for prompts and one for what follows."""

    def __init__(self) -> None:
        self.first, self.second = FakeLink(PREFILL), FakeLink(DECODE)
        super().__init__(self.first, self.second)


@pytest.mark.parametrize("other", [DECODE, BOTH])
def test_the_first_token_comes_from_one_runner_and_the_rest_from_another(other: Role) -> None:
    first, second = FakeLink(PREFILL), FakeLink(other)
    rig = Rig(first, second)
    generation = rig.submit()
    assert (first.attempts, second.attempts) == ([(1, 1, {0: []})], [])
    rig.make(first, generation, 8, finish_reason=LENGTH)
    assert taken(generation) == [(0, [8], None)]
    assert second.attempts == [(2, 100, {0: [8]})]
    rig.make(first, generation, 9, attempt=1)
    rig.make(second, generation, 10, 11, finish_reason=STOP)
    assert taken(generation) == [(0, [10, 11], STOP)]
    assert (first.cancels, second.cancels, generation.losses_in_a_row) == ([], [], 0)


def test_candidates_go_on_together_when_the_last_of_them_has_its_token() -> None:
    rig = Pair()
    generation = rig.submit(n=3)
    rig.make(rig.first, generation, 8, candidate=2, finish_reason=LENGTH)
    rig.make(rig.first, generation, 9, candidate=0, finish_reason=LENGTH)
    assert rig.second.attempts == []
    rig.make(rig.first, generation, 10, candidate=1, finish_reason=LENGTH)
    assert rig.second.attempts == [(2, 100, {0: [9], 1: [10], 2: [8]})]


def test_a_candidate_that_ends_with_its_first_token_is_not_handed_over() -> None:
    rig = Pair()
    generation = rig.submit(n=3)
    rig.make(rig.first, generation, candidate=0, finish_reason=STOP)
    rig.make(rig.first, generation, 9, candidate=1, finish_reason=LENGTH)
    rig.make(rig.first, generation, 10, candidate=2, finish_reason=STOP)
    assert rig.second.attempts == [(2, 100, {1: [9]})]
    assert taken(generation) == [(0, [], STOP), (1, [9], None), (2, [10], STOP)]


def test_an_answer_that_ends_with_the_first_token_of_every_candidate_needs_no_other_runner() -> None:
    rig = Pair()
    generation = rig.submit(n=2)
    rig.make(rig.first, generation, candidate=0, finish_reason=STOP)
    rig.make(rig.first, generation, 9, candidate=1, finish_reason=STOP)
    assert generation.stream.has_ended
    only_one = rig.submit(max_tokens=1)
    rig.make(rig.first, only_one, 8, finish_reason=LENGTH)
    assert taken(only_one) == [(0, [8], LENGTH)]
    assert rig.second.attempts == []


def test_a_candidate_that_a_stop_string_ends_holds_up_no_hand_over() -> None:
    rig = Pair()
    generation = rig.submit(n=2)
    rig.make(rig.first, generation, 8, candidate=0, finish_reason=LENGTH)
    rig.router.cancel_candidate(generation, 1)
    assert rig.first.cancels == [(generation.number, (1,))]
    assert rig.second.attempts == [(2, 100, {0: [8]})]
    alone = rig.submit()
    rig.make(rig.first, alone, 8, finish_reason=LENGTH)
    rig.router.cancel_candidate(alone, 0)
    assert rig.second.cancels == [(alone.number, (0,))]
    assert alone.stream.has_ended


def test_the_prompts_logprobs_come_from_the_first_runner_alone() -> None:
    rig = Pair()
    generation = rig.submit(prompt_logprobs=0)
    rig.router.take_prompt_logprobs(rig.first, generation.number, 1, [TokenLogprobs()] * 2)
    rig.make(rig.first, generation, 8, finish_reason=LENGTH)
    assert not generation.needs_prompt_logprobs
    rig.make(rig.second, generation, 9)
    news = generation.stream.take()
    assert (news.prompt_logprobs, news.tokens[0].token_ids) == ([TokenLogprobs()] * 2, [8, 9])


def test_each_runners_use_of_the_cache_counts() -> None:
    rig = Pair()
    generation = rig.submit()
    for link, use in ((rig.first, CacheUse(16, 0)), (rig.second, CacheUse(32, 3))):
        position = len(generation.token_ids[0])
        tokens = Tokens(0, [8], LENGTH)
        rig.router.take_tokens(link, generation.number, generation.attempt, position, tokens, use)
    assert (generation.cached_tokens, sum(generation.recomputed_tokens.values())) == (16, 3)


def test_a_resumed_answer_goes_where_answers_go_on() -> None:
    rig = Pair()
    rig.submit(resumed={0: [8]})
    rig.submit(n=2, resumed={1: [8]})
    assert (len(rig.first.attempts), len(rig.second.attempts)) == (0, 2)
    generation = rig.submit(n=2, resumed={0: [], 1: []})
    assert rig.first.attempts == [(generation.attempt, 1, {0: [], 1: []})]


def test_tokens_of_candidates_that_have_ended_do_not_make_the_others_go_on() -> None:
    rig = Rig()
    generation = rig.submit(n=2, resumed={0: [8, 9]})
    generation.end_resumed(0, STOP)
    first, second = FakeLink(PREFILL), FakeLink(DECODE)
    rig.join(first, second)
    assert first.attempts == [(1, 100, {1: []})]  # the only one there, when it came
    rig.router.lose(first)
    rig.join(FakeLink(PREFILL))
    assert second.attempts == [(2, 100, {1: []})]


def test_a_client_that_leaves_in_between_is_cancelled_where_its_answer_is() -> None:
    rig = Pair()
    before, after = rig.submit(n=2), rig.submit()
    rig.make(rig.first, before, 8, candidate=1, finish_reason=LENGTH)
    rig.router.cancel(before)
    rig.make(rig.first, before, 9, candidate=0, finish_reason=LENGTH)
    rig.make(rig.first, after, 8, finish_reason=LENGTH)
    rig.router.cancel(after)
    assert (rig.first.cancels, rig.second.cancels) == ([(before.number, ())], [(after.number, ())])
    assert len(rig.second.attempts) == 1


@pytest.mark.parametrize("num_made", [0, 1])
def test_a_runner_that_dies_in_between_leaves_the_rest_to_the_other(num_made: int) -> None:
    rig = Pair()
    generation = rig.submit(n=2)
    if num_made:
        rig.make(rig.first, generation, 8, finish_reason=LENGTH)
    rig.router.lose(rig.first)
    assert rig.second.attempts == [(2, 100, {0: [8] * num_made, 1: []})]


def test_without_the_other_runner_anybody_goes_on() -> None:
    rig = Pair()
    generation = rig.submit()
    rig.router.lose(rig.second)
    rig.make(rig.first, generation, 8, finish_reason=LENGTH)
    assert rig.first.attempts == [(1, 1, {0: []}), (2, 100, {0: [8]})]
    rig.make(rig.first, generation, 9, finish_reason=STOP)
    assert taken(generation) == [(0, [8, 9], STOP)]
    rig.router.lose(rig.first)
    rig.router.ready(rig.second, rig.second.info)
    rig.submit()
    assert rig.second.attempts == [(1, 100, {0: []})]


@pytest.mark.parametrize("others", [[], [PREFILL]])
def test_nothing_is_split_where_nobody_else_goes_on(others: list[Role]) -> None:
    first = FakeLink(PREFILL)
    rig = Rig(first, *map(FakeLink, others))
    rig.submit()
    assert first.attempts == [(1, 100, {0: []})]


def test_nothing_is_split_for_a_runner_that_drains() -> None:
    rig = Pair()
    rig.router.drain(rig.second)
    rig.submit()
    assert rig.first.attempts == [(1, 100, {0: []})]


def test_a_search_stays_in_one_piece() -> None:
    rig = Pair()
    beam_search = BeamSearch(2, 1.0, EARLY_STOPPING_FALSE, intermediate=True)
    generation = rig.submit(n=2, beam_search=beam_search)
    assert (rig.first.attempts, rig.second.attempts) == ([], [(1, 100, {0: [], 1: []})])
    rig.router.take_beams(rig.second, generation.number, 1, [Beam([8], 0.0)])
    rig.router.lose(rig.second)
    assert rig.first.attempts == [(2, 100, {0: [], 1: []})]
    for candidate in range(2):
        rig.make(rig.first, generation, *[9] * 100, candidate=candidate, finish_reason=LENGTH, score=1.0)
    assert taken(generation) == [(0, [9] * 100, LENGTH), (1, [9] * 100, LENGTH)]


def test_a_search_goes_only_where_all_of_it_has_room() -> None:
    small, big = FakeLink(context=100), FakeLink(context=103)
    beam_search = BeamSearch(2, 1.0, EARLY_STOPPING_FALSE, intermediate=False)
    rig = Rig(small)
    generation = rig.submit(beam_search=beam_search)
    assert rig.router.num_waiting == 1
    rig.join(big)
    assert (big.attempts, failure(generation)) == ([(1, 100, {0: []})], None)


def test_a_runner_that_fits_better_and_comes_later_pulls_nothing_off_a_healthy_one() -> None:
    first, second = FakeLink(PREFILL), FakeLink(DECODE)
    rig = Rig(first)
    generation = rig.submit()
    rig.make(first, generation, 8)
    rig.join(second)
    rig.make(first, generation, 9)
    assert (len(first.attempts), first.cancels, second.attempts) == (1, [], [])
    assert rig.router.lose(first) == 1
    assert second.attempts == [(2, 100, {0: [8, 9]})]


def test_a_first_runner_that_drains_hands_over_what_it_has() -> None:
    rig = Pair()
    begun, made = rig.submit(), rig.submit(n=2)
    rig.make(rig.first, made, 8, candidate=1, finish_reason=LENGTH)
    rig.router.drain(rig.first)
    assert rig.second.attempts == [(2, 100, {0: []}), (2, 100, {0: [], 1: [8]})]
    assert rig.first.cancels == [(begun.number, ()), (made.number, ())]
