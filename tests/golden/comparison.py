"""Our logits against those of transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kernels.select import select_kernels
from model_runner.model.load import load_decoder
from tests.golden.paged_run import prefill_in_chunks

BOUND = 2e-3


def compare(path: Path, lengths: Sequence[int], chunk_size: int, *, ours: Path | None = None, **overrides: Any) -> None:
    """Compare logits of random prompts: ours computed in chunks through the paged pool, theirs at once and eagerly.

    Args:
        path: a model directory.
        lengths: of the prompts, in tokens.
        chunk_size: tokens of a step; what is left over, if it is one token, is a decode step.
        ours: what we load; default: the same directory.
        overrides: fields of the configuration that transformers is to see otherwise.
    """
    generator = torch.Generator().manual_seed(len(lengths))
    prompts = [torch.randint(384, (length,), generator=generator).tolist() for length in lengths]
    reference = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", **overrides
    )
    logits = prefill_in_chunks(load_decoder(ours or path, select_kernels("cpu")), prompts, chunk_size)
    for prompt, rows in zip(prompts, logits, strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(rows, expected, rtol=0, atol=BOUND)
        assert expected.std() > 0.5, "a model this flat would agree with anything"
