"""From a scheduled step to the tensors that the device works on.

Everything is derived anew each step from the sequences' block tables; nothing of an earlier step is patched.
"""

from dataclasses import dataclass

import torch

from kernels.interface import AttentionBatch, SamplingBatch
from kernels.kv_layout import NULL_BLOCK
from model_runner.sampler import SampleRequest, sampling_batch
from model_runner.step import Step


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


def build_batch(step: Step, block_size: int) -> DeviceBatch:
    """Lay out the entries of a step one after the other, in the step's order."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    sample_requests: list[SampleRequest] = []
    tables: list[list[int]] = []
    query_starts = [0]
    context_lengths: list[int] = []
    for entry in step.entries:
        sequence = entry.sequence
        first, last = sequence.num_computed, sequence.num_computed + entry.num_tokens
        table: list[int] = [block.id for block in sequence.block_table[: -(-last // block_size)]]
        token_ids += sequence.token_ids[first:last]
        positions += range(first, last)
        slots += [table[p // block_size] * block_size + p % block_size for p in range(first, last)]
        tables.append(table)
        query_starts.append(len(token_ids))
        context_lengths.append(last)
        if entry.samples:
            logit_rows.append(len(token_ids) - 1)
            request = SampleRequest(sequence.sampling, sequence.candidate, sequence.num_generated_tokens)
            sample_requests.append(request)
    width = max((len(table) for table in tables), default=0)
    return DeviceBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        attention=AttentionBatch(
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            block_tables=torch.tensor(
                [table + [NULL_BLOCK] * (width - len(table)) for table in tables], dtype=torch.int64
            ),
            query_starts=torch.tensor(query_starts, dtype=torch.int64),
            context_ends=torch.tensor(context_lengths, dtype=torch.int64),
            query_lengths=[entry.num_tokens for entry in step.entries],
            context_lengths=context_lengths,
            num_decodes=sum(entry.num_tokens == 1 for entry in step.entries),
        ),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
        sampling=sampling_batch(sample_requests),
        copies=torch.tensor([[copy.source.id, copy.destination.id] for copy in step.copies], dtype=torch.int64),
    )
