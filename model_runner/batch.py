"""From a scheduled step to the tensors that the device works on.

Everything is derived anew each step from the sequences' block tables; nothing of an earlier step is patched.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from kernels.interface import PADDING_SLOT, AttentionBatch, SamplingBatch
from kernels.kv_layout import NULL_BLOCK
from model_runner.inputs import InputLayout, InputWords, StepInputs
from model_runner.sampler import fill_sampling_fields, needs_of, view_sampling_fields
from model_runner.sampling_extras import DeviceExtras, PromptRows, lay_out_extras
from model_runner.sequence import Sequence
from model_runner.shared_prefix import count_shared_blocks
from model_runner.step import Scheduled, Step

HostWords = InputWords[npt.NDArray[np.int64]]


def new_words(num_words: int) -> npt.NDArray[np.int64]:
    """Memory of its own for one step's inputs."""
    return np.empty(num_words, np.int64)


def lay_out(
    step: Step,
    block_size: int,
    reserve: Callable[[int], npt.NDArray[np.int64]] = new_words,
    *,
    padded_to: int | None = None,
    look_for_sharing: bool = False,
) -> StepInputs:
    """Lay out the entries of a step one after the other, in the step's order.

    With 64 decodes of 8,192 tokens in blocks of 16 this takes 0.2 ms, a third of it for the tables.

    Args:
        step: what to compute.
        block_size: tokens a block.
        reserve: memory for so many words.
        padded_to: sequences, of which each has one token: fill the batch up with such as compute nothing. No fewer
            than the step samples for.
        look_for_sharing: whether shared leading blocks are of use.
    """
    entries = step.entries
    counts = [num_tokens for _, num_tokens in entries]
    lasts = [sequence.num_computed + num_tokens for sequence, num_tokens in entries]
    sampled, sampling = step.samples()
    padding = 0 if padded_to is None else padded_to - len(entries)
    layout = InputLayout(
        num_tokens=sum(counts) + padding,
        num_sequences=len(entries) + padding,
        num_samples=len(sampled) if padded_to is None else padded_to,
        table_width=-(-max(lasts, default=0) // block_size),
        num_copies=len(step.copies),
    )
    words = reserve(layout.num_words)
    inputs = InputWords(layout, words)
    _write_sequences(inputs, entries, counts, lasts, block_size)
    _write_sampling(inputs, sampling, sampled)
    if padding:
        _write_padding(inputs, sum(counts), len(entries))
    for row, copy in zip(inputs.copies, step.copies, strict=True):
        row[:] = copy.source.id, copy.destination.id
    num_decodes = counts.count(1)
    shared_blocks = 0
    if look_for_sharing:
        ends = inputs.context_ends[:num_decodes]
        shared_blocks = count_shared_blocks(inputs.block_tables[:num_decodes], ends, block_size)
    inputs.shared_blocks[0] = shared_blocks
    extras = None
    if any([sequence.wants_extras for sequence, _ in entries]):  # noqa: C419 - a list takes half as long
        extras = lay_out_extras(sampling, _prompts(entries, counts))
    return StepInputs(
        layout=layout,
        words=words,
        query_lengths=counts + [1] * padding,
        context_lengths=lasts + [0] * padding,
        num_decodes=num_decodes + padding,
        num_samples=len(sampled),
        sampling_needs=needs_of(inputs.sampling[:, : len(sampled)]),
        extras=extras,
        has_shared_blocks=shared_blocks > 0,
    )


def write_sampled_tokens(inputs: StepInputs, step: Step) -> None:
    """Write the last known tokens of `step` anew into its inputs, which were laid out when they were not known."""
    tokens = [entry.sequence.token_ids[-1] for entry in step.entries if entry.samples]
    views = InputWords(inputs.layout, inputs.words)
    views.token_ids[views.logit_rows[: len(tokens)]] = tokens
    if inputs.extras is not None:
        inputs.extras.write_last_tokens()


def _prompts(entries: list[Scheduled], counts: list[int]) -> dict[int, PromptRows]:
    """Prompts whose log-probabilities are wanted: the tokens of this step that another one of the prompt follows."""
    prompts = {}
    for (sequence, num_tokens), first in zip(entries, accumulate(counts, initial=0), strict=False):
        position, prompt = sequence.num_computed, sequence.prompt_logprobs
        last = min(position + num_tokens, sequence.num_prompt_tokens - 1)
        if prompt is not None and not prompt.is_complete and last > position:
            prompts[first] = PromptRows(prompt, position, sequence.token_ids[position + 1 : last + 1])
    return prompts


def _write_sequences(
    inputs: HostWords, entries: list[Scheduled], counts: list[int], lasts: list[int], block_size: int
) -> None:
    """Everything but sampling and copies. `counts` and `lasts`: new tokens of each entry, and all tokens up to them."""
    num_tokens, num_sequences = sum(counts), len(entries)
    tables, tokens = inputs.block_tables, list[int]()
    for row, (sequence, _), last in zip(tables, entries, lasts, strict=False):
        tokens += sequence.token_ids[sequence.num_computed : last]
        num_blocks = -(-last // block_size)
        row[:num_blocks] = sequence.block_table.ids[:num_blocks]
        row[num_blocks:] = NULL_BLOCK
    inputs.token_ids[:num_tokens] = tokens
    ends = inputs.context_ends[:num_sequences]
    ends[:] = lasts
    starts = inputs.query_starts[: num_sequences + 1]
    starts[0] = 0
    starts[1:] = np.cumsum(counts)
    # A sequence's last token has the position `last - 1`; the row after it is the next sequence's first.
    owners = np.arange(num_sequences).repeat(np.array(counts, np.int64))
    positions = np.arange(num_tokens) + (ends - starts[1:])[owners]
    inputs.positions[:num_tokens] = positions
    blocks = tables[owners, positions // block_size]
    inputs.slot_mapping[:num_tokens] = blocks * block_size + positions % block_size


def _write_sampling(inputs: HostWords, sequences: list[Sequence], rows: list[int]) -> None:
    """One sample for each of `sequences`, which are `rows` of the batch; samples that pad it are greedy."""
    num_samples, fields = len(rows), inputs.sampling
    inputs.logit_rows[:num_samples] = inputs.query_starts[1:][rows] - 1
    inputs.logit_rows[num_samples:] = 0
    positions = [sequence.num_generated_tokens for sequence in sequences]
    fill_sampling_fields(fields[:, :num_samples], [sequence.sampling_row for sequence in sequences], positions)
    fields[:, num_samples:] = 0


def _write_padding(inputs: HostWords, num_tokens: int, num_sequences: int) -> None:
    """What follows the real tokens and sequences: sequences with one token each, stored nowhere, seeing nothing."""
    inputs.token_ids[num_tokens:] = 0
    inputs.positions[num_tokens:] = 0
    inputs.slot_mapping[num_tokens:] = PADDING_SLOT
    inputs.context_ends[num_sequences:] = 0
    inputs.block_tables[num_sequences:] = NULL_BLOCK
    starts = inputs.query_starts[num_sequences:]
    starts[:] = np.arange(num_tokens, num_tokens + len(starts))


@dataclass(frozen=True)
class DeviceBatch:
    """Inputs of one forward pass. Valid for one step."""

    token_ids: torch.Tensor
    """[tokens] int64."""
    positions: torch.Tensor
    """[tokens] int64: index of each token in its sequence."""
    attention: AttentionBatch
    logit_rows: torch.Tensor
    """[samples] int64: rows of the tokens that the next token is sampled from."""
    sampling: SamplingBatch
    """One entry for each of logit_rows."""
    copies: torch.Tensor
    """[copies, 2] int64: blocks to copy before anything is written, source and destination."""
    extras: DeviceExtras | None
    """What some of the requests ask for; None if none of them does."""


def view_batch(inputs: StepInputs, words: torch.Tensor, extra_words: torch.Tensor | None = None) -> DeviceBatch:
    """What `inputs` says, as views of its words where the step is to run.

    Args:
        inputs: of the step.
        words: its words.
        extra_words: those of its extras; None if it has none.
    """
    views = InputWords(inputs.layout, words)
    return DeviceBatch(
        token_ids=views.token_ids,
        positions=views.positions,
        attention=AttentionBatch(
            slot_mapping=views.slot_mapping,
            block_tables=views.block_tables,
            query_starts=views.query_starts,
            context_ends=views.context_ends,
            query_lengths=inputs.query_lengths,
            context_lengths=inputs.context_lengths,
            num_decodes=inputs.num_decodes,
            shared_blocks=views.shared_blocks if inputs.has_shared_blocks else None,
        ),
        logit_rows=views.logit_rows,
        sampling=view_sampling_fields(views.sampling, inputs.sampling_needs),
        copies=views.copies,
        extras=view_extras(inputs, extra_words),
    )


def view_extras(inputs: StepInputs, extra_words: torch.Tensor | None) -> DeviceExtras | None:
    """Its extras, as views of their words where the step is to run."""
    return None if inputs.extras is None or extra_words is None else inputs.extras.view(extra_words)
