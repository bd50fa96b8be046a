"""Steps that are run before the first request: kernels get compiled, and the largest step gets its memory."""

import dataclasses
from collections.abc import Iterator

from kernels.kv_layout import NULL_BLOCK
from model_runner.block_table import BlockTable
from model_runner.sampling_params import SamplingParams
from model_runner.sequence import Sequence
from model_runner.step import Scheduled, Step
from pagekeeper.common.ids import BlockId, SequenceId
from pagekeeper.common.operations import BlockRef

_GREEDY = SamplingParams(0.0, 1.0, 0, 0.0, 0, frozenset())
_RANDOM = SamplingParams(1.0, 1.0, 0, 0.0, 0, frozenset())
_FILTERED = SamplingParams(1.0, 0.9, 50, 0.1, 0, frozenset())
_EVERYTHING = dataclasses.replace(_FILTERED, typical_p=0.9, repetition_penalty=1.1, logprobs=20)


def warm_up_steps(max_batch_tokens: int, max_sequences: int, max_context_length: int) -> Iterator[Step]:
    """The longest prefill, then as many sequences at once as may be, for each way to sample.

    All blocks are the null block: it may be read, and the caller sees to it that nothing is written.
    """
    yield Step([_prefill(min(max_batch_tokens, max_context_length), _GREEDY)], [])
    num_sequences = min(max_sequences, max_batch_tokens)
    num_tokens = min(max_batch_tokens // num_sequences, max_context_length)
    for sampling in (_GREEDY, _RANDOM, _FILTERED, _EVERYTHING):
        yield Step([_prefill(num_tokens, sampling)] * num_sequences, [])


def _prefill(num_tokens: int, sampling: SamplingParams) -> Scheduled:
    # As many blocks as tokens: enough for any block size.
    blocks = BlockTable([BlockRef(BlockId(NULL_BLOCK), 0)] * num_tokens)
    sequence = Sequence(SequenceId(0), "", [0] * num_tokens, num_tokens, num_tokens + 1, sampling, block_table=blocks)
    return Scheduled(sequence, num_tokens)
