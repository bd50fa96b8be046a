"""A GPU as a `Device`.

A step on the stream: its inputs go up by one copy, what only some requests ask for by another; blocks are copied; the
forward pass, which is one graph if every sequence decodes, and operation by operation otherwise; sampling; the token
ids come back by one small copy. The host waits for none of it. What is copied up lies in one of two pinned buffers, so
that a step's inputs can be laid out while those of the step before may still be on their way, and no step ever sees
another one's.
"""

import time
from dataclasses import dataclass

import torch

from cache_manager.memory.interface import MappedPool
from kernels.interface import PADDING_SLOT, Kernels
from kernels.kv_layout import KvLayout
from kernels.kv_pool import KvPool
from model_runner.batch import DeviceBatch, lay_out, view_batch, view_extras
from model_runner.choice import Choice, bring, choose
from model_runner.cuda.buckets import bucket_for, bucket_sizes
from model_runner.cuda.graphs import DecodeGraphs
from model_runner.cuda.queue import Event, Queue
from model_runner.cuda.staging import Staging
from model_runner.cuda.warm_up import warm_up_steps
from model_runner.device import check_device, run_eagerly, view_pool
from model_runner.inputs import InputLayout, InputWords, StepInputs
from model_runner.model.decoder import Decoder
from model_runner.sampling_extras import SamplingExtras
from model_runner.step import Sampled, Step
from pagekeeper.common.errors import BugError, ConfigurationError

_OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""torch has a class for it, but memory is also taken by kernels when they are loaded, by graphs and by cuBLAS."""


@dataclass(frozen=True)
class DeviceLimits:
    """The most of everything; memory for it is taken at start."""

    max_batch_tokens: int
    """Tokens of a step."""
    max_sequences: int
    """Sequences of a step."""
    max_context_length: int
    """Tokens of a sequence."""


class CudaFlight:
    """A step on the stream."""

    def __init__(
        self,
        inputs: StepInputs,
        launched: float,
        began: Event,
        ended: Event,
        tokens: torch.Tensor,
        choice: list[Choice],
    ) -> None:
        self._inputs = inputs
        self._launched = launched
        self._began = began
        self._ended = ended
        self._tokens = tokens
        self._choice = choice

    @property
    def ended(self) -> bool:
        """See `Flight`; a step that failed has ended."""
        try:
            return self._ended.query()
        except RuntimeError:
            return True

    def wait(self, timeout_s: float) -> bool:
        """See `Flight`; a step of a GPU is too short to do anything else meanwhile."""
        self._ended.synchronize()
        return True

    def result(self) -> tuple[Sampled, float]:
        """See `Flight`.

        Raises:
            RuntimeError: the step failed; nothing can be launched any more.
        """
        self._ended.synchronize()
        sampled = [bring(self._tokens.tolist(), self._inputs.extras, choice) for choice in self._choice]
        return sampled[0] if sampled else Sampled([]), self._launched + self._ended.seconds_since(self._began)


class CudaDevice:
    """Runs steps on a stream of a GPU.

    Args:
        decoder: on the GPU.
        kernels: those that it was loaded for.
        layout: of the pool.
        limits: of a step.
        queue: the stream.
    """

    def __init__(
        self, decoder: Decoder, kernels: Kernels, layout: KvLayout, limits: DeviceLimits, queue: Queue
    ) -> None:
        self._decoder = decoder
        self._kernels = kernels
        self._layout = layout
        self._limits = limits
        self._queue = queue
        self._pool: KvPool | None = None
        self._sizes = bucket_sizes(min(limits.max_sequences, limits.max_batch_tokens))
        width = layout.blocks_for(limits.max_context_length)
        # A grant copies at most one block, and a step runs on at most one grant for each sequence.
        most = limits.max_sequences
        num_words = InputLayout(limits.max_batch_tokens, most, most, width, most).num_words
        self._words = torch.zeros(num_words, dtype=torch.int64, device=queue.device)
        self._stagings = [Staging(queue, num_words, most) for _ in range(2)]
        self._graphs = DecodeGraphs(queue, self._words, self._sizes, width, layout.block_size, decoder.vocab_size)
        queue.synchronize()  # the weights and these tensors were filled on other streams

    def bind(self, memory: MappedPool, num_blocks: int) -> None:
        """See `Device`; compiles the kernels, captures the graphs and takes memory for the largest step."""
        # Errors keep the frames that they passed alive, so none may hold a view of the pool, which is unmapped next.
        self._pool = view_pool(memory, self._layout, num_blocks)
        check_device(self._pool.raw.device, self._queue.device)
        if not self._warm_up():
            raise ConfigurationError(
                "device: the GPU's memory is too small for weights, pool and a step's work; lower --pool-size, "
                "--max-batch-tokens or --max-sequences"
            )

    def unbind(self) -> None:
        """See `Device`; the graphs go with the pool that they were captured on."""
        if self._pool is None:
            return
        try:
            self._queue.synchronize()  # a bind that failed may have left work behind
        finally:
            self._pool = None
            self._graphs.drop()
        self._queue.release_memory()

    def prepare(self, step: Step) -> StepInputs:
        """See `Device`; waits until the buffer's last copy has ended, which it has unless two steps are in flight."""
        size = len(step.entries) + sum(len(siblings) for _, siblings in step.siblings)
        bucket = bucket_for(size, self._sizes) if step.num_tokens == len(step.entries) else None
        reserve = self._stagings[0].reserve
        return lay_out(step, self._layout.block_size, reserve, padded_to=bucket, look_for_sharing=True)

    def launch(self, inputs: StepInputs) -> CudaFlight:
        """See `Device`."""
        pool, staging = self._bound_pool, self._stagings[0]
        self._stagings.reverse()
        words, tokens = self._words[: inputs.layout.num_words], staging.tokens[: inputs.num_samples]
        launched, began = time.monotonic(), self._queue.record()
        staging.copy_to(words, self._queue)
        extra_words = self._pinned(inputs.extras)
        choice: list[Choice] = []  # filled in by the time when the step has ended
        self._queue.run(lambda: self._run(inputs, words, extra_words, pool, tokens, choice))
        return CudaFlight(inputs, launched, began, self._queue.record(), tokens, choice)

    def close(self) -> None:
        """See `Device`."""
        self._queue.synchronize()

    def _warm_up(self) -> bool:
        """Capture the graphs, then run the largest steps; False if the memory does not suffice.

        In this order: a capture gives back what no tensor uses, and the largest step has to fit beside the graphs.
        """
        limits = self._limits
        try:
            self._graphs.capture(self._forward, self._bound_pool)
            for step in warm_up_steps(
                limits.max_batch_tokens, limits.max_sequences, limits.max_context_length, self._sizes
            ):
                inputs = self.prepare(step)
                InputWords(inputs.layout, inputs.words).slot_mapping[:] = PADDING_SLOT
                self.launch(inputs).result()
        except RuntimeError as error:
            if not any(words in str(error) for words in _OUT_OF_MEMORY):
                raise
            return False
        return True

    @property
    def _bound_pool(self) -> KvPool:
        if self._pool is None:
            raise BugError("no pool is bound")
        return self._pool

    def _pinned(self, extras: SamplingExtras | None) -> torch.Tensor | None:
        """A copy of the words in pinned memory of their own: their number has no bound to keep some ready for."""
        if extras is None:
            return None
        pinned = self._queue.pin(len(extras.words))
        pinned.numpy()[:] = extras.words
        return pinned

    @torch.inference_mode()
    def _run(
        self,
        inputs: StepInputs,
        words: torch.Tensor,
        extra_words: torch.Tensor | None,
        pool: KvPool,
        tokens: torch.Tensor,
        choice: list[Choice],
    ) -> None:
        if extra_words is not None:
            extra_words = extra_words.to(self._queue.device, non_blocking=True)
        found = self._graphs.find(inputs)
        if found is None:
            batch = view_batch(inputs, words, extra_words)
            chosen = run_eagerly(batch, self._decoder, self._kernels, pool)
            if chosen is None:
                return
        else:
            views = InputWords(inputs.layout, words)
            if inputs.layout.num_copies:
                self._kernels.copy_blocks(pool, views.copies)
            logits = self._graphs.replay(found, inputs.layout, views.block_tables)
            sampling = found.sampling_of(inputs.sampling_needs)
            chosen = choose(logits, sampling, view_extras(inputs, extra_words), self._kernels)
        choice.append(chosen)
        tokens.copy_(chosen.token_ids[: len(tokens)], non_blocking=True)

    def _forward(self, batch: DeviceBatch, pool: KvPool, logits: torch.Tensor) -> torch.Tensor:
        return self._decoder.forward(batch.token_ids, batch.positions, batch.attention, pool, batch.logit_rows, logits)
