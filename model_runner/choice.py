"""From a step's logits to what its end brings: tokens, and for those who ask how likely they and others were."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

import torch

from kernels.interface import Kernels, Logprobs, SamplingBatch
from model_runner.logprobs import TokenLogprobs
from model_runner.model.decoder import Decoder, Hidden
from model_runner.sampling_extras import DeviceExtras, PromptRows, SamplingExtras
from model_runner.step import Continuations, PromptNews, Sampled

_PROMPT_LOGITS = 1 << 22
"""Logits of prompts that exist at a time: 16 MB."""


@dataclass(frozen=True)
class Choice:
    """What a step's end brings, where the step ran. None: nobody asks for it."""

    token_ids: torch.Tensor
    """[samples] int64."""
    logprobs: Logprobs | None = None
    """Of the rows that ask for them, for the token chosen."""
    continuations: Logprobs | None = None
    """Of the beams, with their likeliest tokens by what the edits left of the logits."""
    continued: Logprobs | None = None
    """Of the beams too, for these tokens, by the logits before the edits."""
    prompts: Logprobs | None = None
    """Of the tokens of prompts, for the token after each."""


def choose(logits: torch.Tensor, sampling: SamplingBatch, extras: DeviceExtras | None, kernels: Kernels) -> Choice:
    """Choose a token for each row of `logits [samples, vocab]`, which are changed. Nothing waits for the host."""
    if extras is None:
        return Choice(kernels.sample(logits, sampling))
    rows, beams = extras.rows, extras.beams
    own = logits[rows] if len(rows) else None
    own_of_beams = logits[beams] if extras.follows_beams else None
    kernels.edit_logits(logits, extras.edits)
    token_ids = kernels.sample(logits, sampling)
    logprobs = continuations = continued = None
    if own is not None:
        logprobs = kernels.logprobs(own, token_ids[rows, None], extras.num_top)
    if len(beams):
        continuations = kernels.logprobs(logits[beams], token_ids[beams, None], extras.num_continuations)
        if own_of_beams is not None:
            continued = kernels.logprobs(own_of_beams, continuations.top_token_ids, extras.num_top)
    return Choice(token_ids, logprobs, continuations, continued)


def prompt_logprobs(hidden: Hidden, extras: DeviceExtras | None, decoder: Decoder, kernels: Kernels) -> Logprobs | None:
    """How likely the prompts' tokens were; logits exist of a bounded number of tokens at a time."""
    if extras is None or not len(extras.prompt_rows):
        return None
    height = max(1, _PROMPT_LOGITS // decoder.vocab_size)
    parts = [
        kernels.logprobs(decoder.logits(hidden, rows), token_ids[:, None], extras.num_prompt_top)
        for rows, token_ids in zip(extras.prompt_rows.split(height), extras.next_tokens.split(height), strict=True)
    ]
    return Logprobs(*(torch.cat([getattr(part, column.name) for part in parts]) for column in fields(Logprobs)))


def bring(token_ids: list[int], extras: SamplingExtras | None, choice: Choice) -> Sampled:
    """The same on the host, once the step has ended."""
    if extras is None:
        return Sampled(token_ids)
    logprobs = dict[int, list[TokenLogprobs]]()
    continuations = dict[int, Continuations]()
    if choice.logprobs is not None:
        chosen = [[token_ids[row]] for row in extras.rows]
        logprobs |= zip(extras.rows, _rows(choice.logprobs, chosen, extras.rows.values()), strict=True)
    if choice.continuations is not None:
        best, values = choice.continuations.top_token_ids.tolist(), choice.continuations.top.tolist()
        for (row, beam), tokens, of_tokens in zip(extras.beams.items(), best, values, strict=True):
            continuations[row] = list(zip(tokens, of_tokens, strict=True))[: beam.num_continuations]
        if choice.continued is not None:
            tops = [beam.num_top or 0 for beam in extras.beams.values()]
            found = dict(zip(extras.beams, _rows(choice.continued, best, tops), strict=True))
            logprobs |= {row: found[row] for row, beam in extras.beams.items() if beam.num_top is not None}
    prompts = [] if choice.prompts is None else list(_prompts(choice.prompts, extras.prompts))
    return Sampled(token_ids, logprobs, continuations, prompts)


def _prompts(found: Logprobs, prompts: list[PromptRows]) -> Iterator[PromptNews]:
    next_tokens = [[token_id] for rows in prompts for token_id in rows.next_tokens]
    tops = [rows.prompt.num_top for rows in prompts for _ in rows.next_tokens]
    told = _rows(found, next_tokens, tops)
    for rows in prompts:
        yield PromptNews(rows.prompt, rows.position, [next(told)[0] for _ in rows.next_tokens])


def _rows(found: Logprobs, token_ids: Iterable[list[int]], counts: Iterable[int]) -> Iterator[list[TokenLogprobs]]:
    """For each row one entry for each of its tokens, with so many of the likeliest tokens as the row wants."""
    columns = (getattr(found, column.name).tolist() for column in fields(Logprobs))
    for chosen, count, values, ranks, top_token_ids, top in zip(token_ids, counts, *columns, strict=True):
        likeliest = top_token_ids[:count], top[:count]
        yield [TokenLogprobs(*entry, *likeliest) for entry in zip(chosen, values, ranks, strict=True)]
