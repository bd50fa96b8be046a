"""What one exchange with the manager costs a step, beside the step itself. It needs no device: the pool is memory."""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.gpu_check.facts import COPY_BANDWIDTH
from bench.gpu_check.random_model import LLAMA_8B
from bench.gpu_check.task import Check, Setting, Task, recorded
from cache_manager.client import CacheClient, Fingerprint
from kernels.kv_layout import KvLayout
from pagekeeper.common.ids import SequenceId
from pagekeeper.common.operations import (
    BlockRef,
    Extend,
    Extended,
    Open,
    Opened,
    Operation,
    Refused,
    Release,
    Result,
    Seal,
    Shortage,
)
from pagekeeper.common.sockets import RuntimeDir

_BATCH, _BLOCK_SIZE, _PROMPT_TOKENS = 64, 16, 256
_LAYOUT = KvLayout(1, 1, _BLOCK_SIZE, 8, "float16")
_POOL_BYTES = 64 << 20
_LIMIT_S = 15.0
_VOCABULARY = 100_000


def tasks(setting: Setting) -> list[Task]:
    """The section."""
    del setting
    return [Task("exchange", _exchange, limit_s=15)]


def _exchange(setting: Setting) -> Iterator[Check]:
    """A decode step of 64 sequences: four of them reach the end of a block, or all at once."""
    with tempfile.TemporaryDirectory(prefix="pk-") as folder:
        flags = ["--runtime-dir", folder, "--device", "cpu", "--pool-size", str(_POOL_BYTES)]
        command = [sys.executable, "-m", "cache_manager", *flags, "--admin-listen", "127.0.0.1:0"]
        manager = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        try:
            directory, expected = RuntimeDir(Path(folder)), Fingerprint("exchange", "none", _LAYOUT.dtype)
            client = CacheClient.connect(directory, "exchange", _LAYOUT, expected, _LIMIT_S)
            num_steps = 48 if setting.dry_run else 320
            for spread, what in ((True, "4 of 64 sequences at a block's end"), (False, "64 of 64 at once")):
                seconds = _Steps(setting, client, spread).measure(num_steps)
                high = statistics.quantiles(seconds, n=100)[-1]
                figure = f"median {statistics.median(seconds) * 1e3:.2f} ms, 99 % within {high * 1e3:.2f} ms"
                yield recorded(f"exchange, {what}", figure, statistics.median(seconds))
                yield from _beside_a_step(setting, what, sum(seconds) / num_steps)
            client.close()
        finally:
            manager.kill()
            manager.wait()


def _beside_a_step(setting: Setting, what: str, seconds: float) -> Iterator[Check]:
    bandwidth = setting.facts.get(COPY_BANDWIDTH)
    if bandwidth:
        step_s = (LLAMA_8B.bytes_read_a_step + _BATCH * _PROMPT_TOKENS * LLAMA_8B.kv_bytes_a_token) / bandwidth
        share = seconds / step_s
        yield recorded(f"exchange, {what}: beside the shortest 8B step, which it overlaps", f"{share:.1%} of it", share)


class _Steps:
    """Decode steps of a full batch without a model.

    Args:
        setting: for random tokens.
        client: attached to a manager.
        spread: whether the sequences reach the ends of their blocks in different steps.
    """

    def __init__(self, setting: Setting, client: CacheClient, spread: bool) -> None:
        self._rng = setting.rng(f"exchange {spread}")
        self._client = client
        first = 1 if spread else 1 + _BATCH  # no two have the same name
        self._names = [SequenceId(first + i) for i in range(_BATCH)]
        lengths = [_PROMPT_TOKENS + (i % _BLOCK_SIZE if spread else 0) for i in range(_BATCH)]
        self._tokens = [self._rng.choices(range(_VOCABULARY), k=length) for length in lengths]
        self._tables: list[list[BlockRef]] = []

    def measure(self, num_steps: int) -> list[float]:
        """Seconds of every exchange of so many steps; steps without one cost nothing."""
        opens: list[Operation] = [
            Open(name, "exchange", tokens, len(tokens) - 1, len(tokens))
            for name, tokens in zip(self._names, self._tokens, strict=True)
        ]
        opened, _ = self._talk(opens)
        self._tables = [result.blocks for result in opened if isinstance(result, Opened)]
        self._talk([self._seal(i, 0, len(self._tokens[i]) // _BLOCK_SIZE) for i in range(_BATCH)])
        times = [self._decode() for _ in range(num_steps)]
        self._talk([Release(name) for name in self._names])
        return [seconds for seconds in times if seconds is not None]

    def _decode(self) -> float | None:
        """Every sequence gets a token; seconds of the exchange, if there was something to say."""
        growing, operations = [], list[Operation]()
        for i, tokens in enumerate(self._tokens):
            tokens.append(self._rng.randrange(_VOCABULARY))
            full, left = divmod(len(tokens), _BLOCK_SIZE)
            if left == 0:
                operations.append(self._seal(i, full - 1, full))
            elif left == 1:
                growing.append(i)
        operations += [Extend(self._names[i], len(self._tokens[i])) for i in growing]
        if not operations:
            return None
        results, seconds = self._talk(operations)
        for i, extended in zip(growing, results[len(results) - len(growing) :], strict=True):
            if isinstance(extended, Extended):
                self._tables[i][extended.kept_blocks :] = extended.blocks
        return seconds

    def _seal(self, index: int, first: int, stop: int) -> Seal:
        tokens = self._tokens[index][first * _BLOCK_SIZE : stop * _BLOCK_SIZE]
        return Seal(self._names[index], tokens, self._tables[index][first:stop])

    def _talk(self, operations: list[Operation]) -> tuple[list[Result], float]:
        """One exchange of an engine with nothing in flight, and its seconds.

        Raises:
            RuntimeError: an operation was not carried out.
        """
        began = time.monotonic()
        self._client.send(0, 0, operations)
        results = self._client.receive(_LIMIT_S)
        seconds = time.monotonic() - began
        for result in results:
            if isinstance(result, Refused | Shortage):
                raise RuntimeError(f"the manager answered: {result}")
        return results, seconds
