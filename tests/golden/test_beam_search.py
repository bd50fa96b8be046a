"""Beam search against transformers' on the same weights: the same answers, the same scores."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from model_runner.beam_search import BeamSearchParams, EarlyStopping
from model_runner.model.load import LoadedModel
from tests.fakes.engine import load_tiny, running_engine
from tests.models import write_tiny_model

SCORE_BOUND = 1e-3
EARLY_STOPPING = {False: EarlyStopping.FALSE, True: EarlyStopping.TRUE, "never": EarlyStopping.NEVER}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def ours(path: Path) -> LoadedModel:
    return load_tiny(path)


@pytest.fixture(scope="module")
def theirs(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


@pytest.mark.parametrize(("width", "length_penalty"), [(4, 1.0), (8, 0.0), (4, 2.0), (8, -1.0)])
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_answers_and_scores_are_those_of_transformers(
    ours: LoadedModel,
    theirs: Any,
    width: int,
    early_stopping: bool | str,
    length_penalty: float,
) -> None:
    rng = random.Random(f"{width}, {early_stopping}, {length_penalty}")
    # From searches in which nothing ends before the limit to such as find their answers within a few tokens.
    cases = [(rng.randrange(1, 60), limit, stops) for limit, stops in ((1, 2), (24, 0), (24, 1), (40, 30), (40, 60))]
    params = BeamSearchParams(width, length_penalty, EARLY_STOPPING[early_stopping], width, intermediate=False)
    for length, max_tokens, num_stops in cases:
        prompt = rng.choices(range(3, 384), k=length)
        stop = sorted(rng.sample(range(3, 384), k=num_stops))
        with running_engine(ours) as engine:
            answer = engine.search(prompt, params, max_tokens, stop=frozenset(stop))
            engine.wait(answer)
            engine.settle()
        with torch.inference_mode():
            expected = theirs.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, length, dtype=torch.int64),
                num_beams=width,
                num_return_sequences=width,
                do_sample=False,
                max_new_tokens=max_tokens,
                length_penalty=length_penalty,
                early_stopping=early_stopping,
                eos_token_id=stop or None,
                pad_token_id=0,
                output_scores=True,
                return_dict_in_generate=True,
            )
        answers = [without_end(row, stop) for row in expected.sequences[:, length:].tolist()]
        assert [hypothesis.token_ids for hypothesis in answer.hypotheses] == answers
        scores = torch.tensor([hypothesis.score for hypothesis in answer.hypotheses])
        torch.testing.assert_close(scores, expected.sequences_scores, rtol=0, atol=SCORE_BOUND)


def without_end(token_ids: list[int], stop: list[int]) -> list[int]:
    """An answer without its stop token, and without what it is padded with."""
    ends = [index for index, token_id in enumerate(token_ids) if token_id in stop]
    return token_ids[: ends[0]] if ends else token_ids
