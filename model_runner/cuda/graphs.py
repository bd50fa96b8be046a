"""Decode steps as captured graphs: one launch instead of hundreds, each of which takes the host microseconds."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.interface import SamplingBatch
from kernels.kv_layout import NULL_BLOCK
from kernels.kv_pool import KvPool
from model_runner.batch import DeviceBatch, lay_out, view_batch
from model_runner.cuda.queue import Graph, Queue
from model_runner.inputs import InputLayout, StepInputs
from model_runner.sampler import SamplingNeeds
from model_runner.shared_prefix import MIN_DECODES
from model_runner.step import Step

Forward = Callable[[DeviceBatch, KvPool, torch.Tensor], object]
"""The forward pass of a batch on a pool; writes the logits into the last argument, [samples, vocab_size] float32."""


@dataclass(frozen=True)
class DecodeGraph:
    """The forward pass of one padded size."""

    graph: Graph
    sampling: SamplingBatch
    """Views of what each replay is given; what the host must know of them is that of no step."""

    def sampling_of(self, needs: SamplingNeeds) -> SamplingBatch:
        """The same for a step, whose needs are these."""
        typical_p = self.sampling.typical_p if needs.typical else None
        return dataclasses.replace(
            self.sampling, all_greedy=needs.all_greedy, filters=needs.filters, typical_p=typical_p
        )


class DecodeGraphs:
    """The graphs of one pool: for each size one that reads shared leading blocks once, and one that does not.

    Graphs read block tables from a tensor of their own, as wide as the longest context; a step's are copied there on
    the device. Everything else they read where a step's inputs arrive. All write their logits to one place, so that
    what one graph needs is memory for the next.

    Args:
        queue: captures and replays.
        words: where inputs arrive on the device.
        sizes: numbers of sequences, see `buckets`.
        width: entries of the longest block table.
        block_size: tokens a block.
        vocab_size: logits of a sequence.
    """

    def __init__(
        self, queue: Queue, words: torch.Tensor, sizes: list[int], width: int, block_size: int, vocab_size: int
    ) -> None:
        self._queue = queue
        self._words = words
        self._sizes = sizes
        self._block_size = block_size
        self._tables = torch.full((sizes[-1], width), NULL_BLOCK, dtype=torch.int64, device=queue.device)
        self._logits = torch.empty(sizes[-1], vocab_size, device=queue.device)
        self._graphs: dict[tuple[int, bool], DecodeGraph] = {}

    def capture(self, forward: Forward, pool: KvPool) -> None:
        """Capture `forward` on `pool` for every size, largest first: the smaller ones fit into the memory of that."""
        self._queue.run(lambda: _forget(self._tables))  # another pool may be smaller than the last
        memory = self._queue.new_graph_memory()
        for size in reversed(self._sizes):
            for shares in (False, True) if size >= MIN_DECODES else (False,):
                self._graphs[size, shares] = self._capture(size, shares, forward, pool, memory)

    def drop(self) -> None:
        """Drop all graphs, and with them every view of the pool."""
        self._graphs.clear()

    def find(self, inputs: StepInputs) -> DecodeGraph | None:
        """The graph of a step's size and kind; None for one that is not all decodes, each with one sample.

        None, too, if more logits than the samples' are wanted.
        """
        layout = inputs.layout
        if not layout.num_tokens == layout.num_sequences == layout.num_samples:
            return None
        if inputs.extras is not None and inputs.extras.prompts:
            return None
        return self._graphs.get((layout.num_sequences, inputs.has_shared_blocks))

    def replay(self, found: DecodeGraph, layout: InputLayout, tables: torch.Tensor) -> torch.Tensor:
        """Logits of the step whose inputs have arrived, valid until the next replay. Only within `Queue.run`."""
        self._tables[: layout.num_sequences, : layout.table_width].copy_(tables)
        found.graph.replay()
        return self._logits[: layout.num_samples]

    def _capture(self, size: int, shares: bool, forward: Forward, pool: KvPool, memory: object) -> DecodeGraph:
        # A pass over padding alone stores nothing.
        inputs = dataclasses.replace(
            lay_out(Step([], []), self._block_size, padded_to=size),
            has_shared_blocks=shares,
            sampling_needs=SamplingNeeds(all_greedy=False, filters=True, typical=True),
        )
        words = self._words[: inputs.layout.num_words]
        batch = self._batch(inputs, words)
        logits = self._logits[:size]

        def warm_up() -> None:
            words.copy_(torch.from_numpy(inputs.words))
            forward(batch, pool, logits)

        def work() -> None:
            forward(batch, pool, logits)

        self._queue.run(warm_up)
        return DecodeGraph(self._queue.capture(work, memory), batch.sampling)

    def _batch(self, inputs: StepInputs, words: torch.Tensor) -> DeviceBatch:
        """The tensors that a graph reads, with upper bounds for what the host does not know of a later step."""
        size, width = inputs.layout.num_sequences, self._tables.shape[1]
        batch = view_batch(inputs, words)
        attention = dataclasses.replace(
            batch.attention,
            block_tables=self._tables[:size],
            context_lengths=[width * self._block_size] * size,
        )
        return dataclasses.replace(batch, attention=attention)


def _forget(tables: torch.Tensor) -> None:
    tables.fill_(NULL_BLOCK)
