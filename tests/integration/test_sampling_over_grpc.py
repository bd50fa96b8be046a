"""Every sampling parameter at once, from the client to the model and back, behind real processes."""

import math
from typing import Any

import pytest

from pagekeeper.cli.server import Server
from pagekeeper.client import BeamSearch, Client

PROMPT = list(range(10, 40))
ASKING: dict[str, Any] = {
    "max_tokens": 9,
    "ignore_eos": True,
    "seed": 5,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.3,
    "presence_penalty": -0.2,
    "logit_bias": {44: -math.inf, 50: 1.5},
    "bad_words": ["the", "quick brown"],
    "stop_token_ids": [60],
    "min_tokens": 2,
    "logprobs": 3,
    "prompt_logprobs": 2,
    "echo": True,
}


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0.0},
        {"temperature": 1.4, "top_k": 60, "top_p": 0.95, "min_p": 0.001, "typical_p": 0.9, "n": 3},
        {"beam_search": BeamSearch(width=3), "n": 2},
    ],
    ids=["greedy", "sampled", "beams"],
)
def test_an_answer_to_everything_comes_twice_the_same_and_tells_of_every_token(
    stack: Server, more: dict[str, Any]
) -> None:
    found = []
    with Client(stack.address) as client:
        for _ in range(2):  # cold, then warm, but for the prompt, which is computed in any case
            answer = client.generate(PROMPT, **ASKING, **more)
            candidates = answer.collect()
            assert len(candidates) == more.get("n", 1)
            for candidate in candidates:
                assert [told.token_id for told in candidate.logprobs] == candidate.token_ids
                assert all(len(told.top) == 3 for told in candidate.logprobs)
                assert 44 not in candidate.token_ids
            assert answer.prompt.token_ids == PROMPT
            assert [told.token_id for told in answer.prompt.logprobs[1:]] == PROMPT[1:]
            assert answer.usage.cached_tokens == 0
            found.append([candidate.token_ids for candidate in candidates])
    assert found[0] == found[1]
