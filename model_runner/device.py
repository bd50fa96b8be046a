"""The device seen as a queue: one step is launched and runs by itself while the engine talks to the cache manager."""

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.utils.dlpack import from_dlpack

from cache_manager.memory.interface import MappedPool
from kernels.interface import Kernels
from kernels.kv_layout import KvLayout
from kernels.kv_pool import KvPool
from model_runner.batch import DeviceBatch, lay_out, view_batch
from model_runner.inputs import StepInputs
from model_runner.model.decoder import Decoder
from model_runner.step import Continuations, Sampled, Step
from pagekeeper.common.errors import ConfigurationError


class Flight(Protocol):
    """A launched step."""

    @property
    def ended(self) -> bool:
        """The step has ended, whatever came of it. May be asked by any thread."""
        ...

    def result(self) -> tuple[Sampled, float]:
        """Wait for the end: what it brings, and its time.monotonic().

        Valid until the launch after the next.
        """
        ...


class Device(Protocol):
    """Runs steps one after the other, in the order of their launch. For one thread, but for what it returns."""

    def bind(self, memory: MappedPool, num_blocks: int) -> None:
        """Compute on this pool from the next step on.

        Raises:
            ConfigurationError: the pool lies on another device, or too little memory is left to work with it.
        """
        ...

    def unbind(self) -> None:
        """Drop every view of the pool, so that its memory can be unmapped. No step may be in flight. Idempotent."""
        ...

    def prepare(self, step: Step) -> StepInputs:
        """Lay out the inputs of the step to be launched next, while the one before may still run.

        Valid until they are launched or others are prepared in their place.
        """
        ...

    def launch(self, inputs: StepInputs) -> Flight:
        """Start the step that was prepared last."""
        ...

    def close(self) -> None:
        """Wait for the last step. Nothing can be launched afterwards."""
        ...


def view_pool(memory: MappedPool, layout: KvLayout, num_blocks: int) -> KvPool:
    """The pool over the same bytes."""
    return KvPool.over(from_dlpack(memory.array()), layout, num_blocks)


def check_device(of_pool: torch.device, of_model: torch.device) -> None:
    """Check that the pool lies where the model does.

    Raises:
        ConfigurationError: it does not.
    """
    if of_pool != of_model:
        raise ConfigurationError(
            f"device: the model is on {of_model} and the cache manager's pool on {of_pool}; start both with the same "
            "--device and CUDA_VISIBLE_DEVICES"
        )


class CpuFlight:
    """A step that a thread runs."""

    def __init__(self, future: Future[tuple[Sampled, float]]) -> None:
        self._future = future

    @property
    def ended(self) -> bool:
        """See `Flight`."""
        return self._future.done()

    def result(self) -> tuple[Sampled, float]:
        """See `Flight`; what the step raised is raised again."""
        return self._future.result()


class CpuDevice:
    """Runs steps on one thread, in order.

    All tensor work stays on that thread: torch keeps a pool of worker threads for each thread that calls it, and two
    pools on the same cores fight.
    """

    def __init__(self, decoder: Decoder, kernels: Kernels, layout: KvLayout) -> None:
        self._decoder = decoder
        self._kernels = kernels
        self._layout = layout
        self._pool: KvPool | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="device")

    def bind(self, memory: MappedPool, num_blocks: int) -> None:
        """See `Device`."""
        self._pool = view_pool(memory, self._layout, num_blocks)
        check_device(self._pool.raw.device, torch.device("cpu"))

    def unbind(self) -> None:
        """See `Device`."""
        self._pool = None

    def prepare(self, step: Step) -> StepInputs:
        """See `Device`."""
        return lay_out(step, self._layout.block_size)

    def launch(self, inputs: StepInputs) -> CpuFlight:
        """See `Device`."""
        if self._pool is None:
            raise RuntimeError("no pool is bound")
        return CpuFlight(self._thread.submit(self._run, inputs, self._pool))

    def close(self) -> None:
        """See `Device`; ends the thread."""
        self._thread.shutdown()

    def _run(self, inputs: StepInputs, pool: KvPool) -> tuple[Sampled, float]:
        with torch.inference_mode():
            batch = view_batch(inputs, torch.from_numpy(inputs.words))
            logits = run_eagerly(batch, self._decoder, self._kernels, pool)
            if logits is None:
                return Sampled([]), time.monotonic()
            tokens = self._kernels.sample(logits, batch.sampling).tolist()
            likeliest = Likeliest.of(logits, inputs.num_continuations)
            return Sampled(tokens, continuations=likeliest.tolist()), time.monotonic()


def run_eagerly(batch: DeviceBatch, decoder: Decoder, kernels: Kernels, pool: KvPool) -> torch.Tensor | None:
    """Copy and compute, operation by operation; returns logits for each of `batch.logit_rows`, None if it has none."""
    if len(batch.copies):
        kernels.copy_blocks(pool, batch.copies)
    if not len(batch.token_ids):
        return None
    logits = decoder.forward(batch.token_ids, batch.positions, batch.attention, pool, batch.logit_rows)
    return logits if len(logits) else None


@dataclass(frozen=True)
class Likeliest:
    """The likeliest tokens of some rows of logits."""

    counts: Mapping[int, int]
    """By row, how many."""
    token_ids: torch.Tensor | None = None
    """[len(counts), most of them] int64."""
    logprobs: torch.Tensor | None = None
    """The same shape."""

    @classmethod
    def of(cls, logits: torch.Tensor, counts: Mapping[int, int]) -> "Likeliest":
        """Find them in `logits [rows, vocabulary]`."""
        if not counts:
            return cls(counts)
        wanted = logits[list(counts)].log_softmax(dim=-1)
        found = wanted.topk(min(max(counts.values()), wanted.shape[-1]))
        return cls(counts, found.indices, found.values)

    def tolist(self) -> dict[int, Continuations]:
        """By row, tokens and their log-probabilities; waits for the device."""
        if self.token_ids is None or self.logprobs is None:
            return {}
        rows = zip(self.counts.items(), self.token_ids.tolist(), self.logprobs.tolist(), strict=True)
        return {row: list(zip(ids[:count], logprobs[:count], strict=True)) for (row, count), ids, logprobs in rows}
