"""For which numbers of sequences decode steps are captured."""

import bisect

_FINE = 8
_FINE_UP_TO = 64
_COARSE = 16


def bucket_sizes(max_sequences: int) -> list[int]:
    """1, 2, 4, then steps of 8 up to 64, then of 16; the last is `max_sequences`.

    A step is padded by less than an eighth from 64 on; below, padding costs little, since reading the weights is most
    of a step. 256 sequences make 23 graphs.
    """
    sizes = [1, 2, 4, *range(_FINE, _FINE_UP_TO, _FINE), *range(_FINE_UP_TO, max_sequences, _COARSE)]
    return [*(size for size in sizes if size < max_sequences), max_sequences]


def bucket_for(num_sequences: int, sizes: list[int]) -> int | None:
    """The smallest of `sizes`, which rise, that holds `num_sequences`; None if there is none, or nothing to hold."""
    index = bisect.bisect_left(sizes, num_sequences)
    return sizes[index] if num_sequences and index < len(sizes) else None
