"""The demo model against transformers, which reads the same GGUF file with a loader of its own.

What transformers says takes half a minute to compute and never changes, so pytest's cache keeps it, under a key of
everything it depends on. Both sides go on past the end-of-sequence token.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig

from kernels.select import select_kernels
from model_runner.model.load import LoadedModel, load_decoder
from tests.golden.paged_run import generate_greedily
from tests.golden.prompts import PROMPTS

NUM_TOKENS = 64
LOGITS_BOUND = 2e-3
NEAR_TIE = 1e-3

# transformers needs about a minute for its part, more beside other work.
pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Reference:
    """What transformers computes."""

    prefilled: torch.Tensor
    """[prompts, vocab]: logits of each prompt's last token."""
    tokens: torch.Tensor
    """[prompts, NUM_TOKENS]: its greedy continuation."""
    gaps: torch.Tensor
    """[prompts, NUM_TOKENS]: by how much each token's logit leads the second largest."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """OpenMP's threads spin while they wait for each other: beside other work, two are ten times slower than one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def prompts(demo_model: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    return [tokenizer.encode(prompt).ids for prompt in PROMPTS]


@pytest.fixture(scope="module")
def ours(demo_model: Path) -> LoadedModel:
    return load_decoder(demo_model, select_kernels("cpu"))


@pytest.fixture(scope="module")
def reference(demo_model: Path, prompts: list[list[int]], ours: LoadedModel, pytestconfig: pytest.Config) -> Reference:
    source = [
        Path(__file__).read_text(),
        transformers.__version__,
        torch.__version__,
        ours.weights_digest.hex(),
        prompts,
    ]
    key = hashlib.sha256(json.dumps(source).encode()).hexdigest()[:16]
    file = pytestconfig.cache.mkdir("smollm2") / f"{key}.pt"
    if not file.exists():
        torch.save(compute_reference(demo_model, prompts), file)
    return Reference(*torch.load(file))


def compute_reference(demo_model: Path, prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All prompts in one batch, padded on the left."""
    model = AutoModelForCausalLM.from_pretrained(demo_model, gguf_file="model.gguf", dtype=torch.float32)
    model.generation_config.eos_token_id = None  # else it would fill in for the None below
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    config = GenerationConfig(
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    with torch.inference_mode():
        generated = model.generate(
            torch.tensor([[0] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)]),
            attention_mask=torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding]),
            generation_config=config,
        )
    top = torch.stack(generated.logits, 1).topk(2, -1).values
    tokens = generated.sequences[:, longest:]
    return generated.logits[0].clone(), tokens.clone(), (top[..., 0] - top[..., 1]).clone()


@pytest.fixture(scope="module")
def generated(ours: LoadedModel, prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    return generate_greedily(ours, prompts, NUM_TOKENS, chunk_size=24)


def test_prefill_logits_equal_transformers(generated: tuple[torch.Tensor, torch.Tensor], reference: Reference) -> None:
    torch.testing.assert_close(generated[0], reference.prefilled, rtol=0, atol=LOGITS_BOUND)


def test_greedy_tokens_equal_transformers_up_to_near_ties(
    generated: tuple[torch.Tensor, torch.Tensor], reference: Reference
) -> None:
    assert generated[1].shape == reference.tokens.shape == (24, NUM_TOKENS)
    for prompt, tokens, expected, gaps in zip(PROMPTS, generated[1], reference.tokens, reference.gaps, strict=True):
        parted = (tokens != expected).nonzero()
        if len(parted):
            assert gaps[parted[0]] < NEAR_TIE, f"after {prompt!r} token {parted[0].item()} differs"
