"""A harness that cannot fail proves nothing: what is planted in a stream is found in it."""

from bench.chaos.streams import Difference, Expected, Stream, difference

EXPECTED = Expected((5, 6, 7, 8), "five six seven eight")


def stream(*deltas: tuple[int, list[int], str]) -> Stream:
    """One that got these deltas, a second apart, and was finished then."""
    made = Stream(prompt=3, began=0.0)
    for second, (position, token_ids, text) in enumerate(deltas, start=1):
        made.take(float(second), position, token_ids, text)
    made.finish(9.0, EXPECTED, recomputed_tokens=0)
    return made


def faults_of(made: Stream) -> tuple[int, int]:
    return made.lost_tokens, made.doubled_tokens


def test_a_stream_without_a_fault_has_none() -> None:
    made = stream((0, [5], "five"), (1, [6, 7], " six seven"), (3, [8], ""), (4, [], " eight"))
    assert faults_of(made) == (0, 0)
    assert difference(made, EXPECTED) is None
    assert made.is_whole


def test_a_lost_token_is_a_gap_between_positions() -> None:
    made = stream((0, [5], "five"), (2, [7, 8], " seven eight"))
    assert faults_of(made) == (1, 0)
    assert difference(made, EXPECTED) == Difference(3, position=1)


def test_tokens_lost_at_the_end_are_missing_in_a_finished_answer() -> None:
    made = stream((0, [5, 6], "five six"))
    assert faults_of(made) == (2, 0)
    assert difference(made, EXPECTED) == Difference(3, position=2)


def test_a_doubled_token_is_a_position_that_comes_again() -> None:
    made = stream((0, [5, 6], "five six"), (1, [6, 7, 8], " six seven eight"))
    assert faults_of(made) == (0, 1)
    assert difference(made, EXPECTED) == Difference(3, position=2)


def test_a_repeated_delta_is_doubled_and_hides_no_later_gap() -> None:
    made = stream((0, [5, 6], "five six"), (0, [5, 6], ""), (3, [8], ""))
    assert faults_of(made) == (1, 2)


def test_tokens_beyond_the_answer_are_doubled() -> None:
    made = stream((0, [5, 6, 7, 8, 8], ""))
    assert faults_of(made) == (0, 1)


def test_a_wrong_token_is_a_difference_where_it_stands() -> None:
    made = stream((0, [5, 6], "five six"), (2, [9, 8], " nine eight"))
    assert faults_of(made) == (0, 0)
    assert difference(made, EXPECTED) == Difference(3, position=2)


def test_wrong_text_is_a_difference_even_with_the_right_tokens() -> None:
    made = stream((0, [5, 6, 7, 8], "five six six seven eight"))
    assert difference(made, EXPECTED) == Difference(3, position=4)


def test_a_stream_with_an_error_is_not_whole() -> None:
    made = Stream(prompt=0, began=0.0)
    made.take(1.0, 0, [5], "five")
    made.fail(2.0, "UnavailableError: gone")
    assert not made.is_whole
    assert not made.lives_at(2.0)


def test_a_stream_lives_from_its_beginning_to_its_end() -> None:
    made = stream((0, [5, 6, 7, 8], EXPECTED.text))
    assert [made.lives_at(moment) for moment in (-1.0, 0.0, 8.9, 9.0)] == [False, True, True, False]


def test_arrivals_are_counted_from_a_moment_on() -> None:
    made = stream((0, [5], ""), (1, [6], ""), (2, [], "?"), (2, [7, 8], ""))
    assert made.arrivals_after(1.0, 9) == [2.0, 4.0]  # the delta without tokens is none
    assert made.arrivals_after(0.5, 1) == [1.0]
    assert made.arrivals_after(4.0, 9) == []
