"""Driving a decoder through the paged pool, the way the engine does."""

import torch

from model_runner.model.load import LoadedModel
from tests.paging import Chunk, PagedPool


def prefill_in_chunks(model: LoadedModel, prompts: list[list[int]], chunk_size: int) -> list[torch.Tensor]:
    """Logits of every token of every prompt, `[tokens, vocab]` each; prompts advance side by side, chunk by chunk."""
    pool = PagedPool(model.kv_layout(8), 2 + sum(len(prompt) // 8 + 1 for prompt in prompts))
    for prompt in prompts:
        pool.open(len(prompt))
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    for start in range(0, max(map(len, prompts)), chunk_size):
        chunks = [
            Chunk(i, start, min(start + chunk_size, len(prompt)))
            for i, prompt in enumerate(prompts)
            if start < len(prompt)
        ]
        chunks.sort(key=lambda chunk: chunk.stop - chunk.start > 1)
        step = _step(
            model, pool, [(chunk, prompts[chunk.sequence][chunk.start : chunk.stop]) for chunk in chunks], True
        )
        for chunk, rows in zip(chunks, step.split([chunk.stop - chunk.start for chunk in chunks]), strict=True):
            logits[chunk.sequence].append(rows)
    return [torch.cat(rows) for rows in logits]


def generate_greedily(
    model: LoadedModel, prompts: list[list[int]], num_tokens: int, chunk_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prefill in chunks, then decode all prompts in one batch.

    Returns:
        Logits of each prompt's last token, [prompts, vocab], and the generated tokens, [prompts, num_tokens].
    """
    pool = PagedPool(model.kv_layout(16), 2 + sum((len(prompt) + num_tokens) // 16 + 1 for prompt in prompts))
    first = []
    for i, prompt in enumerate(prompts):
        pool.open(len(prompt) + num_tokens)
        for start in range(0, len(prompt), chunk_size):
            chunk = Chunk(i, start, min(start + chunk_size, len(prompt)))
            last = _step(model, pool, [(chunk, prompt[chunk.start : chunk.stop])], False)
        first.append(last)
    prefilled = torch.cat(first)
    tokens = [prefilled.argmax(-1)]
    for position in range(num_tokens - 1):
        chunks = [Chunk(i, len(prompt) + position, len(prompt) + position + 1) for i, prompt in enumerate(prompts)]
        steps = [(chunk, [token]) for chunk, token in zip(chunks, tokens[-1].tolist(), strict=True)]
        tokens.append(_step(model, pool, steps, False).argmax(-1))
    return prefilled, torch.stack(tokens, 1)


def _step(model: LoadedModel, pool: PagedPool, work: list[tuple[Chunk, list[int]]], all_rows: bool) -> torch.Tensor:
    """Run one batch; returns logits of all its tokens, or of each chunk's last."""
    chunks = [chunk for chunk, _ in work]
    token_ids = torch.tensor([token for _, tokens in work for token in tokens])
    positions = torch.tensor([p for chunk in chunks for p in range(chunk.start, chunk.stop)])
    rows = torch.arange(len(token_ids))
    if not all_rows:
        rows = torch.tensor([chunk.stop - chunk.start for chunk in chunks]).cumsum(0) - 1
    return model.decoder.forward(token_ids, positions, pool.batch(chunks), pool.kv, rows)
