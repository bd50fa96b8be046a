"""Real streams, events and graphs, in one process: the pool is memory that torch has allocated."""

import random
from pathlib import Path

import pytest
import torch

from kernels.kv_layout import KvLayout
from kernels.select import select_kernels
from model_runner.cuda.device import CudaDevice, DeviceLimits
from model_runner.cuda.queue import TorchQueue
from model_runner.model.load import LoadedModel, load_decoder
from tests.fakes.engine import BLOCK_SIZE, EngineUnderTest, load_tiny, running_engine
from tests.fakes.local_cache import LocalPool
from tests.models import write_tiny_model

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
NUM_BLOCKS = 256


class GpuMemory:
    """A mapped pool that nobody else maps."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._bytes = torch.full((size,), 0xFF, dtype=torch.uint8, device=GPU)  # NaN in any float

    def array(self) -> torch.Tensor:
        return self._bytes

    def close(self) -> None:
        """Torch frees it."""


def answers(under_test: EngineUnderTest) -> list[list[int]]:
    """Of sequences that prefill in chunks, share a prefix and sample at random."""
    prefix = random.Random(0).choices(range(3, 384), k=40)
    found = under_test.wait(
        *[
            under_test.submit([*prefix[: 8 * (i % 6)], 3 + i], max_tokens=30, temperature=0.8 * (i % 2), seed=i)
            for i in range(16)
        ]
    )
    under_test.settle()
    return found


def real_gpu(model: LoadedModel, layout: KvLayout) -> CudaDevice:
    limits = DeviceLimits(max_batch_tokens=64, max_sequences=12, max_context_length=512)
    return CudaDevice(model.decoder, select_kernels("triton"), layout, limits, TorchQueue(GPU))


def test_float32_on_a_gpu_answers_as_on_the_cpu(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tiny")
    with running_engine(load_tiny(path), max_sequences=12) as under_test:
        expected = answers(under_test)
    model = load_decoder(path, select_kernels("triton"), torch.float32, GPU)
    pool = LocalPool(NUM_BLOCKS, model.kv_layout(BLOCK_SIZE))
    pool.memory = GpuMemory(NUM_BLOCKS * pool.layout.block_bytes)
    with running_engine(model, max_sequences=12, make_device=real_gpu, pool=pool) as under_test:
        assert answers(under_test) == expected


def test_a_graph_does_its_work_on_what_its_tensors_hold_at_each_replay() -> None:
    queue = TorchQueue(GPU)
    words, pinned = torch.zeros(4, dtype=torch.int64, device=GPU), queue.pin(4)
    result = torch.zeros_like(words)

    def work() -> None:
        torch.add(words, 1, out=result)

    queue.synchronize()
    queue.run(work)
    graph = queue.capture(work, queue.new_graph_memory())
    for value in (5, 7):
        pinned.fill_(value)
        began = queue.record()
        queue.run(lambda: words.copy_(pinned, non_blocking=True))
        queue.run(graph.replay)
        ended = queue.record()
        ended.synchronize()
        assert ended.query()
        assert ended.seconds_since(began) >= 0
        assert result.tolist() == [value + 1] * 4
