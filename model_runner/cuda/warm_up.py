"""Steps that are run before the first request: kernels get compiled, and the largest step gets its memory."""

from collections.abc import Iterator

from model_runner.step import Step
from model_runner.warm_up import EVERYTHING, FILTERED, GREEDY, NO_COPY, RANDOM, dummy


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
            decodes = [dummy(1, GREEDY)] * (size - 1)
            yield Step([*decodes, dummy(2, GREEDY)], [NO_COPY])
    yield Step([dummy(min(max_batch_tokens, max_context_length), GREEDY)], [])
    num_sequences = min(max_sequences, max_batch_tokens)
    num_tokens = min(max_batch_tokens // num_sequences, max_context_length)
    for sampling in (GREEDY, RANDOM, FILTERED, EVERYTHING):
        yield Step([dummy(num_tokens, sampling)] * num_sequences, [])
