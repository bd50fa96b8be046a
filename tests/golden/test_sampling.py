"""Log-probabilities, penalties and filters against transformers, where both define them alike."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from kernels import reference
from kernels.interface import LogitEdits, Penalties
from kernels.reference.sampling import keep_top, keep_typical, weights_at
from model_runner.model.load import LoadedModel
from tests.fakes.engine import load_tiny, running_engine
from tests.models import write_tiny_model

BOUND = 2e-3


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def ours(path: Path) -> LoadedModel:
    return load_tiny(path)


@pytest.fixture(scope="module")
def theirs(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


@pytest.mark.parametrize("penalty", [1.0, 1.3, 0.8])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_of_prompt_and_answer_are_their_log_softmax(
    ours: LoadedModel,
    theirs: Any,
    penalty: float,
    temperature: float,
) -> None:
    prompt = random.Random(penalty).choices(range(3, 384), k=75)
    with running_engine(ours) as engine:
        answer = engine.submit(
            prompt, 16, temperature=temperature, seed=3, repetition_penalty=penalty, logprobs=4, prompt_logprobs=4
        )
        engine.wait(answer)
    tokens = torch.tensor([*prompt, *answer.token_ids])
    with torch.inference_mode():
        expected = theirs(tokens[None]).logits[0, :-1].log_softmax(-1)
    told = answer.sequence.prompt_logprobs.found + answer.logprobs
    assert [entry.token_id for entry in told] == tokens[1:].tolist()
    chosen = torch.tensor([entry.logprob for entry in told])
    torch.testing.assert_close(chosen, expected.gather(1, tokens[1:, None])[:, 0], rtol=0, atol=BOUND)
    top = torch.tensor([entry.top_logprobs for entry in told])
    torch.testing.assert_close(top, expected.topk(4).values, rtol=0, atol=BOUND)


@pytest.mark.parametrize("penalty", [1.3, 0.8, 4.0])
def test_greedy_answers_with_a_repetition_penalty_are_theirs(
    ours: LoadedModel,
    theirs: Any,
    penalty: float,
) -> None:
    prompts = [random.Random(i).choices(range(3, 384), k=5 + 20 * i) for i in range(4)]
    with running_engine(ours) as engine:
        answers = engine.wait(*[engine.submit(prompt, 24, repetition_penalty=penalty) for prompt in prompts])
    for prompt, answer in zip(prompts, answers, strict=True):
        found = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=24,
            do_sample=False,
            repetition_penalty=penalty,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert answer == found[0, len(prompt) :].tolist()


def random_logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, 384, generator=torch.Generator().manual_seed(1)) * 3


@pytest.mark.parametrize("penalty", [0.5, 1.7])
def test_the_repetition_penalty_is_theirs(penalty: float) -> None:
    text = torch.randint(384, (3, 40), generator=torch.Generator().manual_seed(2))
    logits = random_logits(3)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(text, logits.clone())
    ones, zeros = torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    owners = torch.arange(3).repeat_interleave(40)
    # By rows, so that the last entries are one for each.
    entries = torch.stack((owners, text.flatten()))[:, torch.arange(120).reshape(3, 40).T.flatten()]
    penalties = Penalties(torch.arange(3), ones * penalty, zeros, zeros, *entries, torch.zeros(120, dtype=torch.int64))
    reference.edit_logits(logits, LogitEdits(penalties=penalties))
    torch.testing.assert_close(logits, expected)


FILTERS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}


@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"typical_p": 0.6},
        {"temperature": 0.7, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.8},
        {"temperature": 1.5, "top_k": 20, "typical_p": 0.3},
    ],
    ids=str,
)
def test_filters_keep_what_theirs_keep_in_the_same_order(changes: dict[str, float]) -> None:
    wanted = FILTERS | changes
    logits = random_logits(20)
    expected = logits.clone()
    warpers = [
        TemperatureLogitsWarper(wanted["temperature"]) if wanted["temperature"] != 1 else None,
        TopKLogitsWarper(wanted["top_k"]) if wanted["top_k"] else None,
        TopPLogitsWarper(wanted["top_p"]) if wanted["top_p"] < 1 else None,
        MinPLogitsWarper(wanted["min_p"]) if wanted["min_p"] else None,
        TypicalLogitsWarper(wanted["typical_p"]) if wanted["typical_p"] < 1 else None,
    ]
    for warper in filter(None, warpers):
        expected = warper(None, expected)

    def column(name: str) -> torch.Tensor:
        return torch.full((20,), wanted[name], dtype=torch.int64 if name == "top_k" else torch.float64)

    weights = keep_top(weights_at(logits, column("temperature")), column("top_k"), column("top_p"), column("min_p"))
    weights = keep_typical(weights, column("typical_p"))
    torch.testing.assert_close(weights / weights.sum(-1, keepdim=True), expected.double().softmax(-1))
