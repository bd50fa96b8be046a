"""The real processes on random models, and what their answers are held against."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import torch

from bench.gpu_check.task import Setting
from kernels import reference
from kernels.interface import AttentionBatch
from kernels.kv_pool import KvPool
from model_runner.model.load import LoadedModel, load_decoder
from pagekeeper.cli.server import Server
from pagekeeper.client import Answer, Client
from pagekeeper.common.sockets import CHANNEL_OPTIONS, RuntimeDir, unix_target
from pagekeeper.v1 import runner_pb2, runner_pb2_grpc

BLOCK_SIZE = 16
TENANT = "default"
"""As the gateway calls everybody without credentials."""


def runtime_dir(model: Path) -> Path:
    """Where the processes that serve `model` have their sockets."""
    return model.parent / "run"


@contextmanager
def serving(setting: Setting, model: Path, memory: str, pool_size: str, **environment: str) -> Iterator[Server]:
    """`pagekeeper up` with a pool of this kind."""
    flags = ["--model", str(model), "--device", "cpu" if setting.dry_run else "cuda", "--pool-size", pool_size]
    flags += ["--runtime-dir", str(runtime_dir(model)), "--start-limit-s", f"{max(setting.remaining_s, 1):.0f}"]
    variables = {"PAGEKEEPER_POOL_MEMORY": memory, "PAGEKEEPER_THREADS": "1" if setting.dry_run else "8"}
    log = model.parent / "server.log"
    try:
        with Server(*flags, log=log, environment=variables | environment) as server:
            yield server
    finally:
        print(log.read_text(), flush=True)


def engine_report(model: Path) -> runner_pb2.EngineReport:
    """What the runner that serves `model` says of its engine, asked as a gateway would.

    Raises:
        RuntimeError: it did not answer.
    """
    socket = RuntimeDir(runtime_dir(model)).runner_sockets()[0]
    ping = runner_pb2.ServeRequest(ping=runner_pb2.Ping(nonce=1))
    with grpc.insecure_channel(unix_target(socket), options=CHANNEL_OPTIONS) as channel:
        for response in runner_pb2_grpc.RunnerServiceStub(channel).Serve(iter([ping])):
            if response.HasField("pong"):
                return response.pong.engine
    raise RuntimeError("the runner did not answer a ping")


def greedy(client: Client, prompt: list[int], max_tokens: int) -> Answer:
    """The answer that has no luck in it, of exactly so many tokens."""
    return client.generate(prompt, temperature=0, max_tokens=max_tokens, ignore_eos=True)


class GreedyOracle:
    """The same weights in float32 on the CPU, with the specification's kernels.

    Args:
        model: a model directory; a tiny one.
    """

    def __init__(self, model: Path) -> None:
        self.model: LoadedModel = load_decoder(model, reference)

    def shortfall(self, prompt: list[int], answer: list[int]) -> float:
        """How far the worst of the answer's tokens was from being the likeliest, in logits; 0 if none was."""
        token_ids = prompt + answer
        layout = self.model.kv_layout(BLOCK_SIZE)
        num_blocks = layout.blocks_for(len(token_ids)) + 1
        pool = KvPool.over(torch.zeros(num_blocks * layout.block_bytes, dtype=torch.uint8), layout, num_blocks)
        everything = torch.arange(len(token_ids))
        batch = AttentionBatch(
            slot_mapping=everything + BLOCK_SIZE,
            block_tables=torch.arange(1, num_blocks).unsqueeze(0),
            query_starts=torch.tensor([0, len(token_ids)]),
            context_ends=torch.tensor([len(token_ids)]),
            query_lengths=[len(token_ids)],
            context_lengths=[len(token_ids)],
            num_decodes=0,
        )
        rows = everything[len(prompt) - 1 : -1]
        logits = self.model.decoder.forward(torch.tensor(token_ids), everything, batch, pool, rows)
        chosen = logits.gather(1, torch.tensor(answer).unsqueeze(1))
        return float((logits.amax(1, keepdim=True) - chosen).max())


class Stream:
    """An answer that is read on a thread of its own, with the time at which each token came."""

    def __init__(self, address: str, prompt: list[int], max_tokens: int) -> None:
        self.token_ids: list[int] = []
        self.times: list[float] = []
        """time.monotonic() of each of `token_ids`."""
        self.answer: Answer | None = None
        self.error: Exception | None = None
        self.began = time.monotonic()
        self._thread = threading.Thread(target=self._read, args=(address, prompt, max_tokens), daemon=True)
        self._thread.start()

    def wait_for(self, num_tokens: int, limit_s: float) -> None:
        """Wait until so many tokens have come.

        Raises:
            TimeoutError: they did not.
        """
        wait_until(lambda: len(self.token_ids) >= num_tokens or not self._thread.is_alive(), limit_s, "tokens")

    def finish(self, limit_s: float) -> None:
        """Wait for the end; what went wrong is raised here."""
        self._thread.join(limit_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the answer had {len(self.token_ids)} tokens after {limit_s:.0f} s")
        if self.error is not None:
            raise self.error

    def longest_pause_s(self) -> float:
        """Between two tokens."""
        return max((after - before for before, after in zip(self.times, self.times[1:], strict=False)), default=0.0)

    def _read(self, address: str, prompt: list[int], max_tokens: int) -> None:
        try:
            with Client(address) as client:
                self.answer = greedy(client, prompt, max_tokens)
                for delta in self.answer:
                    self.token_ids += delta.token_ids
                    self.times += [time.monotonic()] * len(delta.token_ids)
        except Exception as error:  # noqa: BLE001 - it is raised again where the answer is waited for
            self.error = error


def wait_until(condition: Callable[[], bool], limit_s: float, what: str) -> None:
    """Look again and again.

    Raises:
        TimeoutError: it did not become true.
    """
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {limit_s:.0f} s: {what}")
        time.sleep(0.005)
