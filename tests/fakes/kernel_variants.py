"""`python -m tests.fakes.kernel_variants`: names the kernels that steps launch and binding a pool did not compile.

Triton compiles a kernel for each combination of types, alignments and constants. Here, where there is no GPU, nothing
is compiled or computed, and each launch is taken down with the combination that Triton finds for it. Needs a process of
its own, in which kernels are not interpreted.
"""

import dataclasses
import random
import sys
import tempfile
from collections.abc import Sequence as Rows
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction, create_function_from_signature

from kernels import triton as kernels
from kernels.interface import SamplingBatch
from model_runner.block_table import BlockTable
from model_runner.cuda.device import CudaDevice, DeviceLimits
from model_runner.model.load import load_decoder
from model_runner.sampling_params import SamplingParams
from model_runner.sequence import Sequence
from model_runner.step import Scheduled, Step
from pagekeeper.common.ids import BlockId, SequenceId
from pagekeeper.common.operations import BlockCopy, BlockRef
from tests.fakes.cuda_queue import FakeQueue
from tests.fakes.local_cache import LocalPool
from tests.models import write_tiny_model

BLOCK_SIZE, NUM_BLOCKS = 16, 512
LIMITS = DeviceLimits(max_batch_tokens=1024, max_sequences=20, max_context_length=1024)
GREEDY = SamplingParams(0.0, 1.0, 0, 0.0, 0, frozenset())
RANDOM = dataclasses.replace(GREEDY, temperature=1.0)
FILTERED = dataclasses.replace(RANDOM, top_k=5)
PENALISED = dataclasses.replace(GREEDY, repetition_penalty=1.2, logprobs=5)
SHARED = [BlockRef(BlockId(i), 1) for i in range(1, 41)]
RNG = random.Random(0)


class Launches:
    """Takes launches down instead of carrying them out."""

    def __init__(self) -> None:
        self._backend = CUDABackend(GPUTarget("cuda", 90, 32))
        self._found: set[str] = set()

    def new(self, kernel: JITFunction, arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
        """Whether this combination is launched for the first time."""
        bind = create_function_from_signature(kernel.signature, kernel.params, self._backend)
        _, combination, options = bind(*arguments, **options)
        known = len(self._found)
        self._found.add(f"{kernel.fn.__qualname__} {combination} {sorted(options.items())}")
        return len(self._found) > known


def sequence(length: int, num_new: int, sampling: SamplingParams, shared: Rows[BlockRef] = ()) -> Scheduled:
    """A sequence of which all but the last `num_new` tokens are computed."""
    blocks = [BlockRef(BlockId(RNG.randrange(1, NUM_BLOCKS)), 1) for _ in range(-(-length // BLOCK_SIZE))]
    blocks[: len(shared)] = shared
    table = BlockTable(blocks)
    made = Sequence(SequenceId(1), "t", [5] * length, length, length + 1, sampling, block_table=table)
    made.num_computed = length - num_new
    return Scheduled(made, num_new)


def steps(sampling: SamplingParams) -> list[Step]:
    """Of all kinds: decodes of few and many, prefills of few and many rows, both at once, a common prefix, copies."""
    found = [[sequence(100, 1, sampling)] * count for count in (1, 3, 17, 20)]
    common = [sequence(700, 1, sampling, SHARED)] * 9
    found += [common, [*common, sequence(9, 9, sampling)], [sequence(60, 2, sampling)] * 3]
    for chunk in (2, 40, 900):
        found.append([sequence(chunk, chunk, sampling)])
        for count in (1, 17):
            for length in (100, 1000):
                found.append([*[sequence(length, 1, sampling)] * count, sequence(chunk, chunk, sampling)])
    copy = BlockCopy(0, BlockRef(BlockId(1), 1), BlockRef(BlockId(2), 1), 8)
    return [Step(entries, [copy] * (i % 3)) for i, entries in enumerate(found)]


def main() -> None:
    """Bind, launch, and print what was missing."""
    launches, missing = Launches(), list[str]()

    def launch(kernel: JITFunction, *arguments: object, grid: object, warmup: bool, **options: object) -> None:
        del grid, warmup
        if launches.new(kernel, arguments, options):
            missing.append(kernel.fn.__qualname__)

    def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        kernels.sample(logits, batch)
        return torch.zeros(len(logits), dtype=torch.int64)

    JITFunction.run = launch
    backend = SimpleNamespace(**{name: getattr(kernels, name) for name in kernels.__all__} | {"sample": sample})
    with tempfile.TemporaryDirectory() as folder:
        model = load_decoder(write_tiny_model(Path(folder) / "tiny", "qwen3", head_dim=64), backend, torch.bfloat16)
    layout = model.kv_layout(BLOCK_SIZE)
    device = CudaDevice(model.decoder, backend, layout, LIMITS, FakeQueue())
    device.bind(LocalPool(NUM_BLOCKS, layout).memory, NUM_BLOCKS)
    if len(missing) < 10:
        raise RuntimeError(f"binding launched {missing} alone: launches are not taken down")
    missing.clear()
    for sampling in (GREEDY, RANDOM, FILTERED, PENALISED):
        for step in steps(sampling):
            device.launch(device.prepare(step)).result()
    sys.stdout.write(" ".join(missing))


if __name__ == "__main__":
    main()
