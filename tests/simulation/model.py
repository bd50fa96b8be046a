"""The simulated model: the KV of a token is a number that depends on everything before it, and so does the next token.

So the fault-free answer to a request is a pure function of the request, whoever computes which part of it; or, where
rounding decides, one of a few, each of whose tokens fits exactly the tokens before it.
"""

import itertools
from collections.abc import Iterable

from model_runner.beam_search import BeamSearch, BeamSearchParams
from model_runner.step import Continuations, Hypothesis

STOP = 0
VOCABULARY = 12
_MASK = (1 << 61) - 1
# Few tokens, so that answers agree for a while, part, and fill equal blocks.
_NEXT = (1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3, 4, 4, 5, 6, 7, 8, 9, 10, 11, STOP)
_ONE_TIE_IN = 8


def mix(value: int, token_id: int) -> int:
    """The KV of a token behind a token with the KV `value`."""
    value = ((value ^ token_id * 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & _MASK
    return value ^ value >> 29


def origin(tenant: str) -> int:
    """What stands before the first token of a tenant's sequences."""
    value = 1
    for byte in tenant.encode():
        value = mix(value, byte)
    return value


def chain(value: int, token_ids: Iterable[int]) -> list[int]:
    """The KV of tokens that follow `value`."""
    values = list(itertools.accumulate(token_ids, mix, initial=value))
    del values[0]
    return values


def likeliest(value: int, seed: int, candidate: int) -> tuple[int, int]:
    """What candidate `candidate` of a request samples behind a token with the KV `value`.

    Now and then two tokens are as likely as each other, up to rounding; mostly both are the same.
    """
    choice = mix(mix(value, seed), candidate) >> 7
    first = _NEXT[choice % len(_NEXT)]
    choice //= len(_NEXT)
    return first, _NEXT[choice % len(_NEXT)] if choice % _ONE_TIE_IN == 0 else first


def continuations(value: int, count: int) -> Continuations:
    """The likeliest tokens behind a token with the KV `value`."""
    scores = sorted(((mix(value, 1000 + token_id) % 4096, token_id) for token_id in range(VOCABULARY)), reverse=True)
    return [(token_id, (score - 4096) / 1024) for score, token_id in scores[:count]]


def search(value: int, params: BeamSearchParams, max_tokens: int) -> list[Hypothesis]:
    """The whole fault-free answer of a beam search."""
    beams = BeamSearch(params, frozenset({STOP}), max_tokens)
    values = [value]
    while choices := beams.advance([continuations(each, beams.num_continuations) for each in values]):
        values = [mix(values[choice.parent], choice.token_id) for choice in choices]
    return beams.hypotheses
