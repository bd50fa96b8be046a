"""A sequence: the tokens of one candidate, and how far their KV has come.

```
            Open granted                 stop token, length
  WAITING ───────────────▶ RUNNING ───────────────────────────▶ ENDED
     ▲                        │                                    ▲
     └──── preempted: Release ┘            cancelled (from any) ───┘

  FOLLOWING ── Fork of another one ──▶ RUNNING
  FOLLOWING ── what it has in common with another one is sealed ──▶ WAITING
```

Preemption, resume after a runner's death and a restart of the cache manager are all the same arrow back to WAITING:
the next Open brings prompt and generated tokens, and the cache returns the longest sealed prefix.
"""

import enum
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from model_runner.block_table import BlockTable
from model_runner.logprobs import PromptLogprobs
from model_runner.sampling_params import SamplingParams
from model_runner.token_counts import TokenCounts
from pagekeeper.common.ids import SequenceId

if TYPE_CHECKING:
    from model_runner.beam_group import BeamGroup


class FinishReason(enum.Enum):
    """Why a sequence ended by itself."""

    STOP = "stop"
    LENGTH = "length"


class Status(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = enum.auto()
    FOLLOWING = enum.auto()
    """Waits for another sequence of its request; the cache manager does not know it."""
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    """Chosen to give way; its Release goes out with the next message, then it waits again."""
    ENDED = enum.auto()


@dataclass(eq=False)
class PendingFork:
    """Sequences that are opened as one, since they have the same tokens."""

    num_tokens: int
    """How many those are: where they part."""
    children: list["Sequence"]
    """All but the one that is opened."""


@dataclass(eq=False)
class PendingOpens:
    """Sequences that are opened by themselves once the whole blocks that they begin with can be found."""

    num_tokens: int
    """In these blocks."""
    sequences: list["Sequence"]


@dataclass(eq=False)
class Sequence:
    """Mutable state of one candidate. Only the scheduler changes it."""

    id: SequenceId
    tenant: str
    token_ids: list[int]
    """Prompt, then generated tokens. Grows by one at each sampled token."""
    num_prompt_tokens: int
    max_total_tokens: int
    """Length at which the sequence ends with LENGTH."""
    sampling: SamplingParams
    candidate: int = 0
    priority: int = 0
    """Lower is served earlier."""
    num_resumed_tokens: int = 0
    """Generated tokens that came with the submission."""
    num_continuations: int = 0
    """How many of the likeliest next tokens are wanted instead of one: the sequence is a beam of a search."""
    candidates: list["Sequence"] = field(default_factory=list)
    """Itself and the others of its request that have not ended, one list for all; empty if it never had others."""
    fork: PendingFork | None = None
    """What others wait for while this one is opened, and computed, for them too."""
    opens: PendingOpens | None = None
    """What others wait for while this one computes what they need as well."""
    beams: "BeamGroup | None" = None
    """The search that this is a beam of."""
    prompt_logprobs: PromptLogprobs | None = None
    """Those of the prompt, if they are wanted; shared with the others of its request."""

    status: Status = Status.WAITING
    block_table: BlockTable = field(default_factory=BlockTable)
    num_computed: int = 0
    """Tokens whose KV is in the pool, by steps whose end was seen."""
    num_in_flight: int = 0
    """Tokens of the step that runs now."""
    num_slots: int = 0
    """Tokens that may be written without a word from the cache manager."""
    num_sealed_blocks: int = 0
    open_sent: bool = False
    """An Open was sent and no Release since: the cache manager may know the sequence, if only as a refused Open."""

    was_computed: int = 0
    """Most tokens that were ever computed, by earlier attempts too: computing one of them again is recomputation."""
    num_cached_tokens: int | None = None
    """Prompt tokens that the first Open found; None before."""
    num_recomputed_tokens: int = 0
    num_preemptions: int = 0
    token_counts: TokenCounts | None = None
    """Kept by whoever lays out its penalties."""

    @property
    def order(self) -> tuple[int, int]:
        """Sorts by who is served first: priority, then arrival (ids rise)."""
        return (self.priority, self.id)

    @cached_property
    def sampling_row(self) -> npt.NDArray[np.int64]:
        """[7]: `SamplingParams.row` of this candidate."""
        return self.sampling.row(self.candidate)

    @cached_property
    def wants_extras(self) -> bool:
        """More is asked for than the next token by the plainest of rules; see `sampling_extras`."""
        return self.sampling.wants_extras or self.num_continuations > 0 or self.prompt_logprobs is not None

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of the answer so far, resumed ones included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_launched(self) -> int:
        """Tokens that are computed once the running step has ended."""
        return self.num_computed + self.num_in_flight

    @property
    def length_after_step(self) -> int:
        """Known tokens once the running step has ended: one more if it reaches the last one."""
        return len(self.token_ids) + (self.num_in_flight > 0 and self.num_launched == len(self.token_ids))

    @property
    def most_cached_tokens(self) -> int:
        """Tokens whose KV may come from the cache: the last one's logits are needed, and those of a prompt."""
        most = len(self.token_ids) - 1
        if self.prompt_logprobs is None or self.prompt_logprobs.is_complete:
            return most
        return min(most, len(self.prompt_logprobs.found))

    @property
    def most_slots(self) -> int:
        """Slots that may be asked for: others decide what follows the tokens in common, or those of a beam."""
        if self.fork is not None:
            return self.fork.num_tokens
        return len(self.token_ids) if self.beams is not None else self.max_total_tokens

    @property
    def num_following(self) -> int:
        """Sequences that it may become more by."""
        if self.fork is not None:
            return len(self.fork.children)
        return self.beams.num_free if self.beams is not None else 0

    @property
    def ends_after_step(self) -> bool:
        """The running step is certain to be the last one, whatever it samples."""
        return self.length_after_step >= self.max_total_tokens
