"""A runner reduced to its messages: drives a `CachePolicy` directly."""

from cache_manager.prefix_cache import Fingerprint
from cache_manager.sessions import CachePolicy
from kernels.kv_layout import KvLayout
from pagekeeper.common.ids import SequenceId
from pagekeeper.common.operations import Open, Operation, Result, StepMessage
from tests.fakes.local_cache import FINGERPRINT, TINY_LAYOUT

BLOCK_SIZE = TINY_LAYOUT.block_size


def tiny_policy(num_blocks: int, watermark: float = 0.01) -> CachePolicy:
    """A policy over `num_blocks` blocks of `TINY_LAYOUT`, the null block included; one is the watermark."""
    return CachePolicy(num_blocks * TINY_LAYOUT.block_bytes, watermark)


def tokens(num_blocks: float, base: int = 0) -> list[int]:
    """Token ids that fill so many blocks; another `base` gives others."""
    return [base + position for position in range(int(num_blocks * BLOCK_SIZE))]


def opening(sequence: int, token_ids: list[int], tenant: str = "tenant", reopen: bool = False) -> Open:
    """Open with everything that could be cached or granted."""
    return Open(SequenceId(sequence), tenant, token_ids, len(token_ids), len(token_ids), reopen)


class PolicySession:
    """One session. Each message is sent at the launch of the next step, when the one before it has been seen to end."""

    def __init__(
        self,
        policy: CachePolicy,
        layout: KvLayout = TINY_LAYOUT,
        fingerprint: Fingerprint = FINGERPRINT,
        supersedes: "PolicySession | None" = None,
    ) -> None:
        self.policy = policy
        older = supersedes.epoch if supersedes else None
        self.attachment = policy.attach("runner", 1, layout, fingerprint, now=0.0, supersedes=older)
        self.epoch = self.attachment.epoch
        self.number = 0
        self.step = 0

    def send(self, *operations: Operation) -> list[Result]:
        """The next message, at the launch of the next step."""
        self.step += 1
        return self.message(self.step, self.step - 1, *operations)

    def do(self, operation: Operation) -> Result:
        """The next message, with one operation."""
        return self.send(operation)[0]

    def idle(self) -> None:
        """An empty step: everything launched has ended."""
        self.step += 1
        self.message(self.step, self.step)

    def message(self, step: int, completed_step: int, *operations: Operation) -> list[Result]:
        """A message with step numbers of one's own."""
        self.number += 1
        results = self.policy.apply(self.epoch, StepMessage(self.number, step, completed_step, list(operations)))
        assert self.policy.check_integrity() == []
        return results
