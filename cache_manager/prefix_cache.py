"""Finding blocks by their content: the chain hash, and the indexes of whole blocks and of their beginnings.

A block's hash covers its own tokens and, through its parent's hash, everything before them; at the root stand the
fingerprint and the layout. Two blocks of one pool with equal hashes therefore hold the same bytes.
"""

import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, fields
from hashlib import sha256
from itertools import islice
from typing import NamedTuple

from cache_manager.block import Block, Content
from kernels.kv_layout import KvLayout
from pagekeeper.common.ids import BlockHash


@dataclass(frozen=True)
class Fingerprint:
    """What must be equal for two runners to share blocks."""

    model_config: str
    """SHA-256 of the canonical model configuration, hex."""
    weights: str
    """SHA-256 over the content of the weights, hex."""
    compute_dtype: str
    """The dtype that the model computes in."""


def _field(tag: bytes, value: bytes) -> bytes:
    """One tagged, length-prefixed field: no two lists of fields have the same concatenation."""
    return struct.pack("<B", len(tag)) + tag + struct.pack("<Q", len(value)) + value


def root_hash(fingerprint: Fingerprint, layout: KvLayout) -> BlockHash:
    """The parent of every first block of a pool."""
    digest = sha256()
    for part in (fingerprint, layout):
        for item in fields(part):
            digest.update(_field(item.name.encode(), str(getattr(part, item.name)).encode()))
    return BlockHash(digest.digest())


def block_hash(parent: BlockHash, tenant: str, token_ids: list[int]) -> BlockHash:
    """The hash of a full block that follows `parent`. Token ids are 32-bit unsigned numbers."""
    digest = sha256(_field(b"parent", parent))
    digest.update(_field(b"tenant", tenant.encode()))
    digest.update(_field(b"tokens", struct.pack(f"<{len(token_ids)}I", *token_ids)))
    return BlockHash(digest.digest())


def chain_hashes(parent: BlockHash, tenant: str, token_ids: list[int], block_size: int) -> Iterator[BlockHash]:
    """The hashes of the full blocks that `token_ids` fill after `parent`, one by one; a partial block is left out."""
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = block_hash(parent, tenant, token_ids[start : start + block_size])
        yield parent


MOST_CANDIDATES = 16
"""Blocks with the same parent and first token that are compared, newest first: a popular beginning may have thousands,
and 16 take 6 us."""

_Beginning = tuple[BlockHash, str, int]
"""Parent, tenant and first token. The tenant is in the parent's hash as well, but not in the root's."""


class PartialHit(NamedTuple):
    """A block whose first `num_tokens` slots hold what was looked for."""

    block: Block
    num_tokens: int


class PrefixCache:
    """What can be found: SEALED blocks, and FREE ones that have not been reused.

    By its hash each content is found in at most one block. By their first tokens are found full blocks and tails alike;
    those with the same beginning are linked, newest first, through the blocks themselves.
    """

    def __init__(self) -> None:
        self._blocks: dict[BlockHash, Block] = {}
        self._newest: dict[_Beginning, Block] = {}
        self._num_tails = 0

    def __len__(self) -> int:
        return len(self._blocks) + self._num_tails

    def find(self, block_hash: BlockHash) -> Block | None:
        """The full block with this content, if there is one."""
        return self._blocks.get(block_hash)

    def longest_prefix(self, hashes: Iterator[BlockHash], limit: int) -> list[Block]:
        """The blocks of the first hashes that are all found, at most `limit`; hashes beyond are not computed."""
        found: list[Block] = []
        for block_hash in islice(hashes, limit):
            block = self._blocks.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def partial_hit(self, wanted: Content) -> PartialHit | None:
        """The block with the most leading tokens of `wanted`, which has one at least; the newest of several."""
        best, num_tokens = None, 0
        for block, token_ids in islice(self._beginning_like(wanted), MOST_CANDIDATES):
            while num_tokens < len(wanted.token_ids) and _agree(token_ids, wanted.token_ids, num_tokens + 1):
                best, num_tokens = block, num_tokens + 1
        return None if best is None else PartialHit(best, num_tokens)

    def add(self, block: Block, content: Content, block_hash: BlockHash) -> None:
        """Make a full block findable. There must be no block with this hash."""
        block.hash = block_hash
        self._blocks[block_hash] = block
        self._link(block, content)

    def add_tail(self, block: Block, content: Content) -> None:
        """Make a tail findable, unless another block is found that holds the same: then it has no content."""
        found = self.partial_hit(content)
        if found is not None and found.num_tokens == len(content.token_ids):
            block.content = None
        else:
            self._num_tails += 1
            self._link(block, content)

    def remove(self, block: Block) -> None:
        """Forget the content of a findable block."""
        if block.content is None:
            return
        if block.hash is None:
            self._num_tails -= 1
        else:
            del self._blocks[block.hash]
        if block.older is not None:
            block.older.newer = block.newer
        if block.newer is not None:
            block.newer.older = block.older
        elif block.older is not None:
            self._newest[_beginning(block.content)] = block.older
        else:
            del self._newest[_beginning(block.content)]
        block.content = block.hash = block.older = block.newer = None

    def is_linked(self, block: Block) -> bool:
        """Whether a findable block stands where it is found by its first tokens."""
        if block.content is None:
            return False
        before = block.newer.older if block.newer else self._newest.get(_beginning(block.content))
        return before is block and (block.older is None or block.older.newer is block)

    def _beginning_like(self, content: Content) -> Iterator[tuple[Block, "array[int]"]]:
        block = self._newest.get(_beginning(content))
        while block is not None and block.content is not None:
            yield block, block.content.token_ids
            block = block.older

    def _link(self, block: Block, content: Content) -> None:
        block.content = content
        beginning = _beginning(content)
        block.older = self._newest.get(beginning)
        if block.older is not None:
            block.older.newer = block
        self._newest[beginning] = block


def _beginning(content: Content) -> _Beginning:
    return content.parent, content.tenant, content.token_ids[0]


def _agree(one: "array[int]", other: "array[int]", num_tokens: int) -> bool:
    return one[:num_tokens] == other[:num_tokens]
