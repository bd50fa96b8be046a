"""From a scheduled step to the tensors that the device works on.

Everything is derived anew each step from the sequences' block tables; nothing of an earlier step is patched.
"""

from dataclasses import dataclass

import torch

from kernels.interface import AttentionBatch
from kernels.kv_layout import NULL_BLOCK
from model_runner.sampler import SampleRequest
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
    sample_requests: list[SampleRequest]
    """One for each of logit_rows."""
    copy_sources: list[int]
    """Blocks to copy before anything is written, with copy_destinations."""
    copy_destinations: list[int]


def build_batch(step: Step, block_size: int) -> DeviceBatch:
    """Lay out the entries of a step one after the other, in the step's order."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    sample_requests: list[SampleRequest] = []
    tables: list[list[int]] = []
    for entry in step.entries:
        sequence = entry.sequence
        first, last = sequence.num_computed, sequence.num_computed + entry.num_tokens
        table: list[int] = [block.id for block in sequence.block_table[: -(-last // block_size)]]
        token_ids += sequence.token_ids[first:last]
        positions += range(first, last)
        slots += [table[p // block_size] * block_size + p % block_size for p in range(first, last)]
        tables.append(table)
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
            query_lengths=[entry.num_tokens for entry in step.entries],
            context_lengths=[entry.sequence.num_computed + entry.num_tokens for entry in step.entries],
            num_decodes=sum(entry.num_tokens == 1 for entry in step.entries),
        ),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
        sample_requests=sample_requests,
        copy_sources=[copy.source.id for copy in step.copies],
        copy_destinations=[copy.destination.id for copy in step.copies],
    )
