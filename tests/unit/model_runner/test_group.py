"""How candidates are opened as one, and where beams live."""

from model_runner.beam_group import BeamGroup, Move, most_blocks
from model_runner.beam_search import BeamSearch, BeamSearchParams, EarlyStopping
from model_runner.group import gather
from model_runner.sequence import SamplingParams, Sequence
from pagekeeper.common.ids import SequenceId


def sequence(number: int, *generated: int, was_computed: int = 0) -> Sequence:
    return Sequence(
        id=SequenceId(number),
        tenant="t",
        token_ids=[1, 2, 3, *generated],
        num_prompt_tokens=3,
        max_total_tokens=100,
        sampling=SamplingParams(0.0, 1.0, 0, 0.0, 0, frozenset()),
        was_computed=was_computed,
    )


SIZE = 2


def test_a_lone_candidate_has_nobody_to_wait_for() -> None:
    alone = sequence(1, 4)
    assert gather([alone], SIZE) == [alone]
    assert (alone.fork, alone.opens) == (None, None)


def test_those_that_end_alike_fork_off_the_first_of_them() -> None:
    candidates = [sequence(1, 4), sequence(2, 4), sequence(3, 4)]
    assert gather(candidates, SIZE) == candidates[:1]
    leader = candidates[0]
    assert leader.fork is not None
    assert (leader.fork.num_tokens, leader.fork.children) == (4, candidates[1:])
    assert leader.opens is None


def test_the_shortest_leads_and_who_has_gone_on_alone_follows_once_their_whole_blocks_are_sealed() -> None:
    candidates = [sequence(1, 4, 5), sequence(2, 4), sequence(3, 4), sequence(4, 4, 6, 7)]
    leader = candidates[1]
    assert gather(candidates, SIZE) == [leader]
    assert leader.fork is not None
    assert leader.fork.children == [candidates[2]]
    assert leader.opens is not None
    assert (leader.opens.num_tokens, leader.opens.sequences) == (4, [candidates[0], candidates[3]])


def test_none_that_ends_where_all_part_means_no_fork() -> None:
    candidates = [sequence(1, 4, 5, 6), sequence(2, 4, 7, 6, 8)]
    assert gather(candidates, 3) == candidates[:1]
    leader = candidates[0]
    assert leader.fork is None
    assert leader.opens is not None
    assert (leader.opens.num_tokens, leader.opens.sequences) == (3, candidates[1:])


def test_without_a_whole_block_in_common_nobody_waits_to_be_opened() -> None:
    candidates = [sequence(1), sequence(2), sequence(3, 4, 5)]
    assert gather(candidates, 4) == [candidates[0], candidates[2]]
    assert candidates[0].fork is not None
    assert candidates[0].fork.children == [candidates[1]]


def test_what_one_had_computed_was_computed_for_all() -> None:
    (leader,) = gather([sequence(1), sequence(2, 4, 5, was_computed=4)], SIZE)
    assert leader.was_computed == 3


def beams(width: int) -> BeamGroup:
    params = BeamSearchParams(width, 1.0, EarlyStopping.FALSE, width, intermediate=False)
    return BeamGroup(BeamSearch(params, frozenset(), 10), [sequence(number) for number in range(width)])


def test_a_beam_stays_where_it_is_and_others_fork_into_what_is_free() -> None:
    group = beams(3)
    first, second, third = group.sequences
    assert group.collect(first, [(5, -1.0), (6, -2.0), (7, -3.0)])
    assert group.move() == Move([], [(first, [third, second])], {first: 5, third: 6, second: 7})
    assert group.beams == [first, third, second]
    assert group.move() is None
    assert not group.collect(first, [(5, -9.0)])
    assert not group.collect(second, [(5, -0.1), (6, -0.2)])
    assert group.collect(third, [(5, -0.3)])
    assert group.move() == Move([first], [(second, [first])], {third: 5, second: 5, first: 6})


def test_the_most_blocks_of_a_search_share_only_the_prompts_full_blocks() -> None:
    assert most_blocks(1, 20, 40, 8) == 5
    assert most_blocks(4, 20, 40, 8) == 2 + 4 * 3
    assert most_blocks(4, 24, 40, 8) == 3 + 4 * 2
