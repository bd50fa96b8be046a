"""A stream without a GPU: work is done in order, but late."""

import dataclasses
import random
import time
from collections import deque
from collections.abc import Callable
from types import ModuleType

import torch

from kernels import reference
from kernels.interface import AttentionBatch, AttentionParams, PagedAttention
from kernels.kv_pool import KvPool

PINNED_POISON = -(2**60)


class FakeEvent:
    """Reached when the queue comes to it."""

    def __init__(self, queue: "FakeQueue") -> None:
        self._queue = queue
        self.reached_at: float | None = None

    def __call__(self) -> None:
        self.reached_at = time.monotonic()

    def query(self) -> bool:
        self._queue.check()
        return self.reached_at is not None

    def synchronize(self) -> None:
        while self.reached_at is None:
            self._queue.do_next()
        self._queue.check()

    def seconds_since(self, earlier: "FakeEvent") -> float:
        assert self.reached_at is not None
        assert earlier.reached_at is not None
        return self.reached_at - earlier.reached_at


@dataclasses.dataclass
class Captured:
    """What is known of a graph, be it still there or not."""

    memory: object
    num_replays: int = 0


class FakeGraph:
    """Work that is done once more at each replay."""

    def __init__(self, queue: "FakeQueue", work: Callable[[], None], captured: Captured) -> None:
        self._queue = queue
        self._work = work
        self._captured = captured

    def replay(self) -> None:
        assert self._queue.working, "a graph is replayed on the stream"
        self._captured.num_replays += 1
        self._work()


class FakeQueue:
    """Does work when somebody waits for it, or a little of it at any call if `rng` says so.

    So whoever changes memory that work still has to read is found out. As on a GPU, work that fails is noticed by
    whoever waits, and nothing is done afterwards.
    """

    device = torch.device("cpu")

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng
        self._work: deque[Callable[[], None]] = deque()
        self._failure: str | None = None
        self.working = False
        self.graphs: list[Captured] = []
        self.num_releases = 0

    def run(self, work: Callable[[], None]) -> None:
        assert not self.working
        self._work.append(work)
        self._drift()

    def record(self) -> FakeEvent:
        event = FakeEvent(self)
        self._work.append(event)
        self._drift()
        return event

    def capture(self, work: Callable[[], None], memory: object) -> FakeGraph:
        self.graphs.append(Captured(memory))
        return FakeGraph(self, work, self.graphs[-1])

    def new_graph_memory(self) -> object:
        return object()

    def pin(self, num_words: int) -> torch.Tensor:
        return torch.full((num_words,), PINNED_POISON, dtype=torch.int64)

    def synchronize(self) -> None:
        while self._work:
            self.do_next()
        self.check()

    def release_memory(self) -> None:
        self.num_releases += 1

    def check(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"CUDA error: {self._failure}")

    def do_next(self) -> None:
        self.check()
        work = self._work.popleft()
        self.working = not isinstance(work, FakeEvent)
        try:
            work()
        except torch.OutOfMemoryError:  # raised where it is launched, unlike what the device notices
            raise
        except Exception as error:  # noqa: BLE001 - like a device, it fails later
            self._failure = str(error)
        finally:
            self.working = False

    def _drift(self) -> None:
        while self._rng is not None and self._work and self._failure is None and self._rng.random() < 0.5:
            self.do_next()


class GraphKernels:
    """The reference, but for lengths: like those of a captured graph they come from the tensors."""

    def __init__(self, kernels: ModuleType = reference) -> None:
        for name in kernels.__all__:
            setattr(self, name, getattr(kernels, name))
        self.num_shared: list[int] = []
        self.prepare_attention = self._prepare_attention

    def _prepare_attention(self, batch: AttentionBatch, kv_pool: KvPool, params: AttentionParams) -> PagedAttention:
        lengths = batch.context_ends.tolist()
        assert all(length <= most for length, most in zip(lengths, batch.context_lengths, strict=True))
        assert batch.query_starts.diff().tolist() == batch.query_lengths
        if batch.shared_blocks is not None:
            self._check_shared(batch, lengths, kv_pool.block_size)
        return reference.prepare_attention(dataclasses.replace(batch, context_lengths=lengths), kv_pool, params)

    def _check_shared(self, batch: AttentionBatch, lengths: list[int], block_size: int) -> None:
        shared = int(batch.shared_blocks)
        decodes = [row for row in range(batch.num_decodes) if lengths[row] > 0]
        tables = batch.block_tables[decodes, :shared]
        assert (tables == tables[:1]).all()
        assert all((lengths[row] - 1) // block_size >= shared for row in decodes)
        self.num_shared.append(shared)
