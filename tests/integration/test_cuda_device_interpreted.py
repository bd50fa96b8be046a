"""The GPU's device with the GPU's kernels, and only the stream played: padded and captured, answers as on the CPU."""

import random
from pathlib import Path

import pytest

from kernels.kv_layout import KvLayout
from kernels.select import select_kernels
from model_runner.cuda.device import CudaDevice, DeviceLimits
from model_runner.model.load import LoadedModel, load_decoder
from tests.fakes.cuda_queue import FakeQueue
from tests.fakes.engine import EngineUnderTest, load_tiny, running_engine
from tests.models import write_tiny_model

MAX_BATCH_TOKENS, MAX_SEQUENCES = 12, 3


OPTIONS = [
    {},
    {"typical_p": 0.8, "repetition_penalty": 1.3, "logprobs": 2},
    {"logit_bias": {9: 3.0}, "bad_words": ((9, 9), (20,)), "prompt_logprobs": 1},
    {"top_p": 0.9, "min_tokens": 3},
]


def answers(under_test: EngineUnderTest) -> list[list[int]]:
    assert under_test.engine.wait_until_attached()
    prompts = [random.Random(i).choices(range(3, 384), k=4 + 7 * i) for i in range(4)]
    return under_test.wait(
        *[
            under_test.submit(prompt, 5, temperature=0.8 * (i % 2), seed=i, **OPTIONS[i])
            for i, prompt in enumerate(prompts)
        ]
    )


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # 64-bit arithmetic wraps, as on a device
def test_kernels_of_captured_steps_take_lengths_from_tensors_and_store_no_padding(tmp_path: Path) -> None:
    kernels, queues = select_kernels("triton-interpret"), []
    path = write_tiny_model(tmp_path / "tiny", num_hidden_layers=1)
    options = {"max_batch_tokens": MAX_BATCH_TOKENS, "max_sequences": MAX_SEQUENCES}
    with running_engine(load_tiny(path), **options) as under_test:
        expected = answers(under_test)

    def played_gpu(model: LoadedModel, layout: KvLayout) -> CudaDevice:
        queues.append(FakeQueue())
        limits = DeviceLimits(MAX_BATCH_TOKENS, MAX_SEQUENCES, max_context_length=64)
        return CudaDevice(model.decoder, kernels, layout, limits, queues[0])

    with running_engine(load_decoder(path, kernels), make_device=played_gpu, **options) as under_test:
        assert answers(under_test) == expected
        under_test.settle()
    assert sum(graph.num_replays for graph in queues[0].graphs) > 4
