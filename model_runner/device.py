"""The device seen as a queue: one step is launched and runs by itself while the engine talks to the cache manager."""

import time
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch.utils.dlpack import from_dlpack

from cache_manager.memory.interface import MappedPool
from kernels.interface import Kernels
from kernels.kv_layout import KvLayout
from kernels.kv_pool import KvPool
from model_runner.batch import DeviceBatch
from model_runner.model.decoder import Decoder


def view_pool(memory: MappedPool, layout: KvLayout, num_blocks: int) -> KvPool:
    """The pool over the same bytes."""
    return KvPool.over(from_dlpack(memory.array()), layout, num_blocks)


class Flight:
    """A launched step."""

    def __init__(self, future: Future[tuple[list[int], float]]) -> None:
        self._future = future

    @property
    def ended(self) -> bool:
        """The step has ended, whatever came of it."""
        return self._future.done()

    def result(self) -> tuple[list[int], float]:
        """Wait for the end: the sampled ids, in order of the batch's logit_rows, and its time.monotonic()."""
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

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self._layout.block_size

    def bind(self, memory: MappedPool, num_blocks: int) -> None:
        """Compute on this pool from the next step on."""
        self._pool = view_pool(memory, self._layout, num_blocks)

    def unbind(self) -> None:
        """Let go of the pool's memory, so that it can be unmapped."""
        self._pool = None

    def launch(self, batch: DeviceBatch) -> Flight:
        """Start a step; it runs after every step launched before it."""
        pool = self._pool
        if pool is None:
            raise RuntimeError("no pool is bound")
        return Flight(self._thread.submit(self._run, batch, pool))

    def close(self) -> None:
        """Wait for the last step and end the thread."""
        self._thread.shutdown()

    def _run(self, batch: DeviceBatch, pool: KvPool) -> tuple[list[int], float]:
        with torch.inference_mode():
            if len(batch.copies):
                self._kernels.copy_blocks(pool, batch.copies)
            tokens: list[int] = []
            if len(batch.token_ids):
                logits = self._decoder.forward(
                    batch.token_ids, batch.positions, batch.attention, pool, batch.logit_rows
                )
                if len(batch.logit_rows):
                    tokens = self._kernels.sample(logits, batch.sampling).tolist()
        return tokens, time.monotonic()
