"""The blocks that sharing saves: by hand, by arithmetic, and by the real policy and scheduler."""

import itertools
import math
import random

import pytest

from bench.length_trace import ALPACA, SHAREGPT, Arrival, Dataset, trace
from bench.likely_tokens import LikelyTokens
from bench.sharing import PUBLISHED, Row, Runner, expected


def test_a_prompt_of_two_full_blocks_is_held_once_by_four_candidates() -> None:
    # The prompt's step: 2 blocks instead of 8. The steps of 3 tokens: 2 + 4 instead of 4 * 3.
    arrivals = [Arrival(0, 32, 3)]
    assert expected(arrivals, 4) == pytest.approx((6 + 3 * 6) / (8 + 3 * 12))
    assert Runner(4, random.Random(0), as_beams=False).run(arrivals) == (8 + 3 * 12, 2 + 3 * 6)


def test_a_prompt_within_a_block_is_shared_only_until_its_candidates_write() -> None:
    assert Runner(2, random.Random(0), as_beams=False).run([Arrival(0, 10, 3)]) == (2 + 3 * 2, 1 + 3 * 2)


@pytest.mark.parametrize("dataset", [ALPACA, SHAREGPT])
def test_candidates_save_what_the_lengths_say(dataset: Dataset) -> None:
    rng = random.Random(1)
    arrivals = trace(dataset, 20, 10.0, rng)
    assert Runner(3, rng, as_beams=False).run(arrivals).saved == pytest.approx(expected(arrivals, 3), rel=0.01)


@pytest.mark.parametrize("as_beams", [False, True])
def test_everything_is_given_back(as_beams: bool) -> None:
    rng = random.Random(2)
    runner = Runner(4, rng, as_beams=as_beams)
    runner.run(trace(ALPACA, 10, 10.0, rng))
    stats = runner.policy.stats()
    assert runner.policy.check_integrity() == []
    assert stats.usage.logical_blocks == 0
    assert stats.pool.free_blocks == stats.pool.total_blocks - 1
    assert stats.counters.forks >= 10 * 3
    assert stats.counters.shortages == 0


def test_beams_share_more_than_candidates_and_more_the_wider_the_search() -> None:
    def saved(width: int, *, as_beams: bool) -> float:
        rng = random.Random(3)
        return Runner(width, rng, as_beams=as_beams).run(trace(ALPACA, 20, 10.0, rng)).saved

    assert saved(2, as_beams=False) < saved(2, as_beams=True) < 1 / 2
    assert saved(2, as_beams=True) < saved(4, as_beams=True) < 3 / 4


@pytest.mark.parametrize("dataset", [ALPACA, SHAREGPT])
def test_a_trace_has_the_means_of_its_dataset_and_comes_again_with_its_seed(dataset: Dataset) -> None:
    arrivals = trace(dataset, 200, 5.0, random.Random(4))
    assert arrivals == trace(dataset, 200, 5.0, random.Random(4))
    assert arrivals != trace(dataset, 200, 5.0, random.Random(5))
    assert sum(arrival.num_prompt_tokens for arrival in arrivals) / 200 == pytest.approx(dataset.prompts.mean, rel=0.01)
    assert sum(arrival.num_answer_tokens for arrival in arrivals) / 200 == pytest.approx(dataset.answers.mean, rel=0.01)
    assert min(min(arrival.num_prompt_tokens, arrival.num_answer_tokens) for arrival in arrivals) >= 1
    assert all(one.step < other.step for one, other in itertools.pairwise(arrivals))
    assert arrivals[-1].step / 199 == pytest.approx(5.0, rel=0.2)


def test_likely_tokens_are_a_part_of_a_distribution_likeliest_first() -> None:
    likely = LikelyTokens(1000, 16, random.Random(6))
    drawn = [likely.draw(12) for _ in range(500)]
    for tokens in drawn:
        assert len(tokens) == len({token_id for token_id, _ in tokens}) == 12
        assert all(0 <= token_id < 1000 for token_id, _ in tokens)
        assert [logprob for _, logprob in tokens] == sorted((logprob for _, logprob in tokens), reverse=True)
        assert sum(math.exp(logprob) for _, logprob in tokens) <= 1 + 1e-9
    sure = sum(math.exp(tokens[0][1]) > 0.907 for tokens in drawn)
    assert 0.3 < sure / 500 < 0.5


def test_a_row_is_held_to_the_paper_only_where_it_has_a_figure() -> None:
    assert Row("Alpaca", "beam search", 4, 0.1, None, None).reaches_published
    assert Row("Alpaca", "beam search", 6, 0.6, None, 0.552).reaches_published
    assert not Row("Alpaca", "beam search", 6, 0.5, None, 0.552).reaches_published
    assert {width for published in PUBLISHED for width in published.saved} == {2, 6}
