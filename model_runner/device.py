"""The device seen as a queue: one step is launched and runs by itself while the engine talks to the cache manager."""

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Protocol

import torch
from torch.utils.dlpack import from_dlpack

from cache_manager.memory.interface import MappedPool
from kernels.interface import Kernels
from kernels.kv_layout import KvLayout
from kernels.kv_pool import KvPool
from model_runner.batch import DeviceBatch, lay_out, view_batch
from model_runner.choice import Choice, bring, choose, prompt_logprobs
from model_runner.inputs import StepInputs
from model_runner.model.decoder import Decoder
from model_runner.step import Sampled, Step
from model_runner.warm_up import cpu_warm_up_steps
from pagekeeper.common.errors import ConfigurationError


class Flight(Protocol):
    """A launched step."""

    @property
    def ended(self) -> bool:
        """The step has ended, whatever came of it. May be asked by any thread."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end, at least if it is so far away; whether it has come."""
        ...

    def result(self) -> tuple[Sampled, float]:
        """Wait for the end: what it brings, and its time.monotonic().

        Valid until the launch after the next.
        """
        ...


class Device(Protocol):
    """Runs steps one after the other, in the order of their launch. For one thread, but for what it returns."""

    def bind(self, memory: MappedPool, num_blocks: int) -> None:
        """Compute on this pool from the next step on; the first one pays no more than later ones.

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

    def wait(self, timeout_s: float) -> bool:
        """See `Flight`."""
        return bool(wait([self._future], timeout_s).done)

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
        self._is_warm = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="device")

    def bind(self, memory: MappedPool, num_blocks: int) -> None:
        """See `Device`."""
        self._pool = view_pool(memory, self._layout, num_blocks)
        check_device(self._pool.raw.device, torch.device("cpu"))
        if not self._is_warm:
            self._warm_up()
            self._is_warm = True

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

    def _warm_up(self) -> None:
        scratch = KvPool.over(torch.zeros(self._layout.block_bytes, dtype=torch.uint8), self._layout, 1)
        for step in cpu_warm_up_steps():
            self._thread.submit(self._run, self.prepare(step), scratch).result()

    def _run(self, inputs: StepInputs, pool: KvPool) -> tuple[Sampled, float]:
        with torch.inference_mode():
            extras = None if inputs.extras is None else torch.from_numpy(inputs.extras.words)
            batch = view_batch(inputs, torch.from_numpy(inputs.words), extras)
            choice = run_eagerly(batch, self._decoder, self._kernels, pool)
            if choice is None:
                return Sampled([]), time.monotonic()
            return bring(choice.token_ids.tolist(), inputs.extras, choice), time.monotonic()


def run_eagerly(batch: DeviceBatch, decoder: Decoder, kernels: Kernels, pool: KvPool) -> Choice | None:
    """Copy, compute and choose, operation by operation; None if there is nothing to compute."""
    if len(batch.copies):
        kernels.copy_blocks(pool, batch.copies)
    if not len(batch.token_ids):
        return None
    hidden = decoder.hidden(batch.token_ids, batch.positions, batch.attention, pool)
    prompts = prompt_logprobs(hidden, batch.extras, decoder, kernels)
    if not len(batch.logit_rows):
        return Choice(batch.logit_rows, prompts=prompts)
    choice = choose(decoder.logits(hidden, batch.logit_rows), batch.sampling, batch.extras, kernels)
    return replace(choice, prompts=prompts)
