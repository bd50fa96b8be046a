"""Steps that are run before the first request: kernels get compiled, and the largest step gets its memory."""

import dataclasses
from collections.abc import Iterator

from kernels.kv_layout import NULL_BLOCK
from model_runner.block_table import BlockTable
from model_runner.sampling_params import SamplingParams
from model_runner.sequence import Sequence
from model_runner.step import Scheduled, Step
from pagekeeper.common.ids import BlockId, SequenceId
from pagekeeper.common.operations import BlockCopy, BlockRef

_GREEDY = SamplingParams(0.0, 1.0, 0, 0.0, 0, frozenset())
_RANDOM = SamplingParams(1.0, 1.0, 0, 0.0, 0, frozenset())
_FILTERED = SamplingParams(1.0, 0.9, 50, 0.1, 0, frozenset())
_EVERYTHING = dataclasses.replace(_FILTERED, typical_p=0.9, repetition_penalty=1.1, logprobs=20)
_NULL = BlockRef(BlockId(NULL_BLOCK), 0)


def warm_up_steps(
    max_batch_tokens: int, max_sequences: int, max_context_length: int, sizes: list[int]
) -> Iterator[Step]:
    """The steps.

    Graphs compile what they need themselves, for the longest contexts. What is left: a short chunk beside decodes of
    short contexts, together as many sequences as each of `sizes` says; the longest prefill; as many sequences at once
    as may be, for each way to sample; copies.

    All blocks are the null block: it may be read, a copy of it onto itself changes nothing, and the caller sees to it
    that no K and V are written.
    """
    for size in sizes:
        if size < max_batch_tokens:
            decodes = [_prefill(1, _GREEDY)] * (size - 1)
            yield Step([*decodes, _prefill(2, _GREEDY)], [BlockCopy(0, _NULL, _NULL, 0)])
    yield Step([_prefill(min(max_batch_tokens, max_context_length), _GREEDY)], [])
    num_sequences = min(max_sequences, max_batch_tokens)
    num_tokens = min(max_batch_tokens // num_sequences, max_context_length)
    for sampling in (_GREEDY, _RANDOM, _FILTERED, _EVERYTHING):
        yield Step([_prefill(num_tokens, sampling)] * num_sequences, [])


def _prefill(num_tokens: int, sampling: SamplingParams) -> Scheduled:
    # As many blocks as tokens: enough for any block size.
    blocks = BlockTable([_NULL] * num_tokens)
    sequence = Sequence(SequenceId(0), "", [0] * num_tokens, num_tokens, num_tokens + 1, sampling, block_table=blocks)
    return Scheduled(sequence, num_tokens)
