"""An `Exchange` within the process: the real policy over real memory, without sockets and without a second process."""

import mmap
import threading
from collections import deque

from cache_manager.client import CacheConnectionLost, Exchange, Fingerprint, Granted
from cache_manager.memory.memfd import MappedMemfd
from cache_manager.sessions import Attachment, CachePolicy, ProtocolViolation
from kernels.kv_layout import KvLayout
from pagekeeper.common.operations import Operation, Result, StepMessage

TINY_LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, block_size=8, head_dim=4, dtype="float32")
FINGERPRINT = Fingerprint(model_config="tiny", weights="random", compute_dtype="float32")


class LocalPool:
    """What the cache manager's process would own: `num_blocks` blocks (the null block included) and their policy.

    Runners on several threads may share it: `lock` is what the manager's one event loop is to them.
    """

    def __init__(self, num_blocks: int, layout: KvLayout = TINY_LAYOUT, fingerprint: Fingerprint = FINGERPRINT) -> None:
        self.layout = layout
        self.fingerprint = fingerprint
        self.memory = MappedMemfd(mmap.mmap(-1, num_blocks * layout.block_bytes))
        self.policy = CachePolicy(num_blocks * layout.block_bytes)
        self.lock = threading.Lock()

    def attach(self, runner_id: str = "runner") -> "LocalCache":
        """A new session; several of them share the pool."""
        return LocalCache(self, runner_id)


class LocalCache(Exchange):
    """One session over a `LocalPool`. A message is applied when it is sent and answered when it is received.

    `lose` plays the loss of the stream: every call raises `CacheConnectionLost` until `reattach`.
    """

    def __init__(self, pool: LocalPool, runner_id: str) -> None:
        self.pool = pool
        self._runner_id = runner_id
        self._attachment = self._attach()
        self._number = 0
        self._answers: deque[list[Result]] = deque()
        self._lost: str | None = None

    @property
    def granted(self) -> Granted:
        attached = self._attachment
        block_bytes = self.pool.layout.block_bytes
        return Granted(attached.epoch, "local", attached.num_blocks, block_bytes, attached.watermark_blocks)

    @property
    def memory(self) -> MappedMemfd:
        return self.pool.memory

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    def send(self, step: int, completed_step: int, operations: list[Operation]) -> None:
        if self._lost:
            raise CacheConnectionLost(self._lost)
        self._number += 1
        message = StepMessage(self._number, step, completed_step, operations)
        try:
            with self.pool.lock:
                self._answers.append(self.pool.policy.apply(self._attachment.epoch, message))
        except ProtocolViolation as violation:
            self.lose(str(violation))

    def receive(self, timeout_s: float) -> list[Result]:
        del timeout_s
        if self._answers:
            return self._answers.popleft()
        if self._lost:
            raise CacheConnectionLost(self._lost)
        raise TimeoutError("every message has been answered")

    def reattach(self, timeout_s: float) -> None:
        del timeout_s
        if self._lost == "closed":
            raise CacheConnectionLost(self._lost)
        self._attachment = self._attach(supersedes=self._attachment)
        self._number = 0
        self._answers.clear()
        self._lost = None

    def close(self) -> None:
        with self.pool.lock:
            self.pool.policy.detach(self._attachment.epoch)
        self._lost = "closed"

    def lose(self, reason: str = "the stream broke") -> None:
        """From now on the session is lost, as if its stream had broken."""
        self._lost = reason

    def _attach(self, supersedes: Attachment | None = None) -> Attachment:
        pool = self.pool
        older = supersedes.epoch if supersedes else None
        with pool.lock:
            return pool.policy.attach(self._runner_id, 0, pool.layout, pool.fingerprint, now=0.0, supersedes=older)


def pool_bytes(exchange: Exchange) -> memoryview:
    """The pool's bytes, to be read and written in place; CPU pools only."""
    return memoryview(exchange.memory.array())
