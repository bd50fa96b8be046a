"""The Triton kernels behind real gateway, runner and cache manager, interpreted on the CPU."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pagekeeper.cli.server import Server
from pagekeeper.client import Client
from tests.models import write_tiny_model
from tests.nothing_left import check_nothing_is_left

BLOCK_SIZE = 8
# Prompts of more than one chunk, the second of which begins inside a block; answers that fill more than one block.
CHUNK = 12
PROMPTS = [list(range(10, 27)), list(range(40, 47)), [*range(10, 27), 200, 201]]
MAX_TOKENS = 10
SAMPLING = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 11, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "logprobs": 2},
    {"temperature": 1.3, "seed": 12, "typical_p": 0.9, "presence_penalty": 1.0, "logit_bias": {30: 2.0}},
]


def answers(server: Server) -> list[list[int]]:
    """Tokens of three requests that run side by side."""

    def answer(index: int) -> list[int]:
        with Client(server.address) as client:
            deltas = client.generate(PROMPTS[index], max_tokens=MAX_TOKENS, ignore_eos=True, **SAMPLING[index])
            return [token for delta in deltas for token in delta.token_ids]

    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        return list(threads.map(answer, range(len(PROMPTS))))


@pytest.mark.timeout(170)
def test_interpreted_triton_kernels_give_the_tokens_of_the_other_backends(
    tmp_path: Path, start_server: Callable[..., Server]
) -> None:
    model = write_tiny_model(tmp_path / "model", "qwen3")
    tokens = {}
    for kernels in ("reference", "cpu", "triton-interpret"):
        flags = ("--device", "cpu", "--pool-size", "1MiB")
        with_settings = {
            "PAGEKEEPER_KERNELS": kernels,
            "PAGEKEEPER_BLOCK_SIZE": str(BLOCK_SIZE),
            "PAGEKEEPER_MAX_BATCH_TOKENS": str(CHUNK),
        }
        server = start_server(*flags, model=model, **with_settings)
        tokens[kernels] = answers(server)
        mapped = Path(f"/proc/{server.pids()['model_runner']}/maps").read_text()
        assert ("libtriton" in mapped) is (kernels == "triton-interpret")
        check_nothing_is_left(server)
        server.stop()
    assert [len(answer) for answer in tokens["reference"]] == [MAX_TOKENS] * len(PROMPTS)
    assert tokens["cpu"] == tokens["reference"]
    assert tokens["triton-interpret"] == tokens["reference"]
