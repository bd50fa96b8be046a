"""Plain data of the cache protocol, as policy and scheduler speak it; cache.proto is its form on the wire.

Each operation is all or nothing. `Shortage` is a value: nothing was changed and the same operation may succeed later.
`Refused` means that the caller broke the protocol: nothing was changed, and repeating it cannot help.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from pagekeeper.common.ids import BlockId, SequenceId


class BlockRef(NamedTuple):
    """A block as it was granted: the generation rises each time the block is granted anew."""

    id: BlockId
    generation: int


@dataclass(frozen=True)
class BlockCopy:
    """Entry `index` of the block table now names `destination`; copy `source` into it before the next write."""

    index: int
    source: BlockRef
    destination: BlockRef
    num_tokens: int


@dataclass(frozen=True)
class Open:
    """Begin a sequence whose known tokens are `token_ids`: take the longest sealed prefix from the cache.

    At most `max_cached_tokens` come out of the cache; slots are granted for at most `max_new_tokens` tokens after
    them, within `token_ids`. Admitted only if the whole of `token_ids` and the watermark are free.
    """

    sequence: SequenceId
    tenant: str
    token_ids: list[int]
    max_cached_tokens: int
    max_new_tokens: int
    reopen: bool = False


@dataclass(frozen=True)
class Extend:
    """Grant slots up to a total of `num_tokens`; a lower value than before gives slots back."""

    sequence: SequenceId
    num_tokens: int


@dataclass(frozen=True)
class Seal:
    """The next unsealed blocks of the sequence are full: `token_ids` holds block_size ids for each of `blocks`."""

    sequence: SequenceId
    token_ids: list[int]
    blocks: list[BlockRef]


@dataclass(frozen=True)
class Fork:
    """Cut `parent` back to `num_tokens`, then let `children` begin with the same blocks."""

    parent: SequenceId
    num_tokens: int
    children: list[SequenceId]


@dataclass(frozen=True)
class Release:
    """End the sequence, or withdraw its refused Open. `tail_token_ids`: computed tokens after the last full block."""

    sequence: SequenceId
    tail_token_ids: list[int] = field(default_factory=list)


Operation = Open | Extend | Seal | Fork | Release


@dataclass(frozen=True)
class Opened:
    """`blocks` is the whole block table: first those that hold `num_cached_tokens`, then fresh ones."""

    num_cached_tokens: int
    blocks: list[BlockRef]
    copies: list[BlockCopy] = field(default_factory=list)


@dataclass(frozen=True)
class Extended:
    """The first `kept_blocks` entries of the table stay, `blocks` follow them, `copies` rename entries."""

    kept_blocks: int
    blocks: list[BlockRef]
    copies: list[BlockCopy] = field(default_factory=list)


@dataclass(frozen=True)
class Sealed:
    """What the sealed entries name now: the given block, or (a fold) the older one with the same content."""

    blocks: list[BlockRef]


@dataclass(frozen=True)
class Forked:
    """The children exist."""


@dataclass(frozen=True)
class Released:
    """The sequence is gone."""


@dataclass(frozen=True)
class Shortage:
    """Not enough free blocks. `releasing_blocks` of this session become free when it reports their step as ended."""

    needed_blocks: int
    free_blocks: int
    releasing_blocks: int


@dataclass(frozen=True)
class Refused:
    """The caller broke the protocol."""

    reason: str


Result = Opened | Extended | Sealed | Forked | Released | Shortage | Refused


@dataclass(frozen=True)
class StepMessage:
    """One message of a session: sent at the launch of `step`; what it grants serves step + 1.

    `number` counts the session's messages from 1. `completed_step` is the last step whose end the host has seen; a
    step with nothing to run ends at once. Blocks let go in a message stay held until a later message reports
    `completed_step` >= that message's `step` + 1.
    """

    number: int
    step: int
    completed_step: int
    operations: list[Operation]
