"""Steps that are run before the first request, which pay what a first use costs."""

import dataclasses
from collections.abc import Iterator

from kernels.kv_layout import NULL_BLOCK
from model_runner.block_table import BlockTable
from model_runner.sampling_params import SamplingParams
from model_runner.sequence import Sequence
from model_runner.step import Scheduled, Step
from pagekeeper.common.ids import BlockId, SequenceId
from pagekeeper.common.operations import BlockCopy, BlockRef

GREEDY = SamplingParams(0.0, 1.0, 0, 0.0, 0, frozenset())
RANDOM = SamplingParams(1.0, 1.0, 0, 0.0, 0, frozenset())
FILTERED = SamplingParams(1.0, 0.9, 50, 0.1, 0, frozenset())
EVERYTHING = dataclasses.replace(FILTERED, typical_p=0.9, repetition_penalty=1.1, logprobs=20)

_NULL = BlockRef(BlockId(NULL_BLOCK), 0)
NO_COPY = BlockCopy(0, _NULL, _NULL, 0)
"""A copy that changes nothing."""


def dummy(num_tokens: int, sampling: SamplingParams) -> Scheduled:
    """A prompt of so many tokens, all of whose blocks are the null block."""
    # As many blocks as tokens: enough for any block size.
    blocks = BlockTable([_NULL] * num_tokens)
    sequence = Sequence(SequenceId(0), "", [0] * num_tokens, num_tokens, num_tokens + 1, sampling, block_table=blocks)
    return Scheduled(sequence, num_tokens)


def cpu_warm_up_steps() -> Iterator[Step]:
    """One row, then many: oneDNN makes other code for these.

    Without them (SmolLM2, two Zen 3 cores) the first step takes 90 ms longer than later ones, and the first of several
    sequences 60 ms; what remains for each new number of rows is 5 ms.
    """
    yield Step([dummy(1, EVERYTHING)], [NO_COPY])
    yield Step([*[dummy(1, GREEDY)] * 15, dummy(9, FILTERED)], [])
