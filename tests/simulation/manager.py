"""The cache manager's process: the real policy behind simulated connections.

As in `cache_manager.service`, a session belongs to a hand-over connection. Its stream may break without harm; the end
of the connection is the proof that the runner has died.
"""

from dataclasses import dataclass
from typing import NamedTuple

from cache_manager.block import Block
from cache_manager.events import BlockStored, CacheEvent
from cache_manager.prefix_cache import Fingerprint, root_hash, tenant_root
from cache_manager.prefix_cache import chain as hash_chain
from cache_manager.sessions import CachePolicy, ProtocolViolation
from kernels.kv_layout import KvLayout
from pagekeeper.common.ids import BlockHash, Epoch
from pagekeeper.common.operations import BlockCopy, Extended, Opened, Refused, StepMessage
from tests.simulation.device import Memory
from tests.simulation.model import chain, origin
from tests.simulation.network import End, Network
from tests.simulation.process import Process
from tests.simulation.world import Violation

MANAGER = "manager"
GOODBYE = "goodbye"
TENANTS = ("anna", "ben")
_FINGERPRINT = Fingerprint(model_config="simulated", weights="none", compute_dtype="float32")
_HASH_BYTES = 32


@dataclass(frozen=True)
class PoolSettings:
    """What a manager is started with.

    Attributes:
        num_blocks: the null block included.
        watermark: share of the blocks that an Open leaves free.
        outlived_by_device_work: the pool is on a GPU: queued work may outlive its process.
        settle_s: how long such work may go on.
        audit_share: after how many of the messages every invariant is checked.
    """

    num_blocks: int
    block_size: int
    watermark: float
    outlived_by_device_work: bool
    settle_s: float
    audit_share: float

    @property
    def layout(self) -> KvLayout:
        """The smallest one."""
        return KvLayout(num_layers=1, num_kv_heads=1, block_size=self.block_size, head_dim=1, dtype="float32")


class Welcome(NamedTuple):
    """The manager's first word on a hand-over connection."""

    token: int
    memory: Memory
    manager: "Manager"


class Hello(NamedTuple):
    """A runner's first word on its stream."""

    token: int
    runner_id: str


class Granted(NamedTuple):
    """The answer to it."""

    epoch: Epoch
    num_blocks: int
    watermark_blocks: int


@dataclass
class _Runner:
    """One that is alive, as far as is known; `epoch` is its newest session."""

    epoch: Epoch | None = None
    said_goodbye: bool = False
    has_ended: bool = False


class Manager(Process):
    """One life of the cache manager, with a pool of its own."""

    def __init__(self, network: Network, settings: PoolSettings) -> None:
        super().__init__(network.world, MANAGER)
        self.settings = settings
        self.memory = Memory(settings.num_blocks, settings.block_size)
        self.policy = CachePolicy(settings.num_blocks * settings.layout.block_bytes, settings.watermark)
        self.policy.listen(self._look_at)
        self._runners: dict[int, _Runner] = {}
        root = root_hash(_FINGERPRINT, settings.layout)
        self._values = {tenant_root(root, tenant): origin(tenant) for tenant in TENANTS}
        """KV of the last token before a block, by the hash of what stands before it."""
        self._roots = {tenant: tenant_root(root, tenant) for tenant in TENANTS}
        self._network = network

    def start(self) -> None:
        """Listen."""
        self._network.servers[MANAGER] = self

    def accept(self, what: str, end: End) -> None:
        """A runner connects."""
        if what == "handover":
            self._welcome(end)
        else:
            end.on_message = lambda hello: self._attach(hello, end)

    def audit(self) -> None:
        """Check every invariant, and that what can be found by its content is what lies there."""
        if violations := self.policy.check_integrity():
            raise Violation(f"the pool is damaged: {violations}")
        for block in self.policy._pool.free_queue:
            self._check_content(block)

    def is_sealed(self, tenant: str, token_ids: list[int]) -> bool:
        """Whether every whole block of these tokens can be found."""
        hashes = [each for each, _ in hash_chain(self._roots[tenant], tenant, token_ids, self.settings.block_size)]
        return all(self.policy._pool.prefix_cache.find(each) is not None for each in hashes)

    def _welcome(self, end: End) -> None:
        token = self.world.random.getrandbits(32)
        runner = self._runners[token] = _Runner()
        end.on_message = lambda _: setattr(runner, "said_goodbye", True)
        end.on_end = lambda: self._runner_ended(runner)
        end.send(Welcome(token, self.memory, self))

    def _runner_ended(self, runner: _Runner) -> None:
        runner.has_ended = True
        if runner.epoch is None:
            return
        outlived = self.settings.outlived_by_device_work and not runner.said_goodbye
        quarantined = self.policy.detach(runner.epoch, quarantine=outlived)
        self.world.note(self.name, "session", runner.epoch, "ends", f"{len(quarantined)} quarantined")
        for epoch in quarantined:
            self.after(self.settings.settle_s, self.policy.settle, epoch)

    def _attach(self, hello: Hello, end: End) -> None:
        runner = self._runners.get(hello.token)
        if runner is None or runner.has_ended:
            end.close()
            return
        attachment = self.policy.attach(
            hello.runner_id, 0, self.settings.layout, _FINGERPRINT, self.world.now, supersedes=runner.epoch
        )
        epoch = runner.epoch = attachment.epoch
        copies: list[tuple[int, BlockCopy]] = []
        end.on_message = lambda message: self._apply(message, epoch, end, copies)
        end.send(Granted(epoch, attachment.num_blocks, attachment.watermark_blocks))
        self.world.note(self.name, "session", epoch, "of", hello.runner_id)

    def _apply(self, message: StepMessage, epoch: Epoch, end: End, copies: list[tuple[int, BlockCopy]]) -> None:
        self._check_copies(message, copies)
        try:
            results = self.policy.apply(epoch, message)
        except ProtocolViolation as violation:
            if self._is_live(epoch):
                raise Violation(f"session {epoch}: {violation}") from violation
            end.close()
            return
        for operation, result in zip(message.operations, results, strict=True):
            if isinstance(result, Refused):
                raise Violation(f"session {epoch}: {operation} was refused: {result.reason}")
            if isinstance(result, (Opened, Extended)):
                copies += [(message.step + 1, copy) for copy in result.copies]
        if self.world.random.random() < self.settings.audit_share:
            self.audit()
        self.world.note(self.name, "answers", epoch, message, results)
        end.send(results)

    def _check_copies(self, message: StepMessage, copies: list[tuple[int, BlockCopy]]) -> None:
        """A step is reported as ended only when it has made the copies that were granted for it."""
        while copies and copies[0][0] <= message.completed_step:
            step, copy = copies.pop(0)
            if copy.destination not in self.memory.filled:
                raise Violation(f"step {step} is reported as ended, and has not made {copy}")

    def _is_live(self, epoch: Epoch) -> bool:
        return any(runner.epoch == epoch and not runner.has_ended for runner in self._runners.values())

    def _look_at(self, event: CacheEvent) -> None:
        """What is sealed must have been written, completely, before."""
        if isinstance(event, BlockStored):
            parent = self._roots[event.tenant] if event.parent_hash is None else event.parent_hash
            values = chain(self._values[parent], event.token_ids)
            self._values[event.block_hash] = values[-1]
            block = self.policy._pool.prefix_cache.find(event.block_hash)
            if block is None or self.memory.blocks[block.id] != values:
                raise Violation(f"{block} is sealed before it holds tokens {event.token_ids}")

    def _check_content(self, block: Block) -> None:
        if block.content is None:
            return
        parent, tokens = BlockHash(block.content[:_HASH_BYTES]), memoryview(block.content)[_HASH_BYTES:].cast("I")
        values = chain(self._values[parent], tokens.tolist())
        if self.memory.blocks[block.id][: len(values)] != values:
            raise Violation(f"{block} is found by content that it does not hold")
