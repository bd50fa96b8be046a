"""Finding blocks by their content: the chain hash, and the indexes of whole blocks and of their beginnings.

A block's hash covers its own tokens and, through its parent's hash, everything before them; at the root stand the
fingerprint and the layout. Two blocks of one pool with equal hashes therefore hold the same bytes.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, fields
from hashlib import sha256
from itertools import islice
from typing import NamedTuple

from cache_manager.block import Block, Content
from kernels.kv_layout import KvLayout
from pagekeeper.common.ids import BlockHash

_PARENT_BYTES = sha256().digest_size
_TOKEN_BYTES = 4


@dataclass(frozen=True)
class Fingerprint:
    """What must be equal for two runners to share blocks."""

    model_config: str
    """SHA-256 of the canonical model configuration, hex."""
    weights: str
    """SHA-256 over the content of the weights, hex."""
    compute_dtype: str
    """The dtype that the model computes in."""


def _head(tag: bytes, num_bytes: int) -> bytes:
    """What stands before a field's value: no two lists of fields that begin so have the same concatenation."""
    return struct.pack("<B", len(tag)) + tag + struct.pack("<Q", num_bytes)


def _field(tag: bytes, value: bytes) -> bytes:
    return _head(tag, len(value)) + value


def root_hash(fingerprint: Fingerprint, layout: KvLayout) -> BlockHash:
    """What every chain of a pool starts from."""
    digest = sha256()
    for part in (fingerprint, layout):
        for item in fields(part):
            digest.update(_field(item.name.encode(), str(getattr(part, item.name)).encode()))
    return BlockHash(digest.digest())


def tenant_root(root: BlockHash, tenant: str) -> BlockHash:
    """The parent of a tenant's first blocks, so that every parent's hash covers the tenant."""
    return BlockHash(sha256(_field(b"parent", root) + _tenant_field(tenant)).digest())


def content_of(parent: BlockHash, token_ids: list[int]) -> Content:
    """What a block holds that begins with these tokens after `parent`. Token ids are 32-bit unsigned numbers."""
    return Content(parent + struct.pack(f"<{len(token_ids)}I", *token_ids))


def chain(parent: BlockHash, tenant: str, token_ids: list[int], block_size: int) -> Iterator[tuple[BlockHash, Content]]:
    """Hash and content of the full blocks that `token_ids` fill after `parent`, one by one, without a partial block."""
    # Only parent and tokens change from block to block; with the rest made once, a block takes 2 us instead of 4.
    before = _head(b"parent", _PARENT_BYTES)
    between = _tenant_field(tenant) + _head(b"tokens", block_size * _TOKEN_BYTES)
    pack = struct.Struct(f"<{block_size}I").pack
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        tokens = pack(*token_ids[start : start + block_size])
        content = Content(parent + tokens)
        parent = BlockHash(sha256(before + parent + between + tokens).digest())
        yield parent, content


def _tenant_field(tenant: str) -> bytes:
    return _field(b"tenant", tenant.encode())


MOST_CANDIDATES = 16
"""Blocks with the same parent and first token that are compared, newest first; a popular beginning has thousands."""


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
        self._newest: dict[bytes, Block] = {}
        """By parent and first token."""
        self._num_tails = 0

    def __len__(self) -> int:
        return len(self._blocks) + self._num_tails

    def find(self, block_hash: BlockHash) -> Block | None:
        """The full block with this content, if there is one."""
        return self._blocks.get(block_hash)

    def longest_prefix(self, chained: Iterator[tuple[BlockHash, Content]], limit: int) -> list[Block]:
        """The first blocks of a chain that are all found, at most `limit`; what follows is not computed."""
        found: list[Block] = []
        for block_hash, _ in islice(chained, limit):
            block = self._blocks.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def partial_hit(self, wanted: Content) -> PartialHit | None:
        """The block with the most leading tokens of `wanted`, at least one; the newest of several."""
        best, common = None, _PARENT_BYTES
        for block, content in islice(self._beginning_like(wanted), MOST_CANDIDATES):
            while common < len(wanted) and content.startswith(wanted[: common + _TOKEN_BYTES]):
                best, common = block, common + _TOKEN_BYTES
        return None if best is None else PartialHit(best, (common - _PARENT_BYTES) // _TOKEN_BYTES)

    def add(self, block: Block, content: Content, block_hash: BlockHash) -> None:
        """Make a full block findable. There must be no block with this hash."""
        block.hash = block_hash
        self._blocks[block_hash] = block
        self._link(block, content)

    def add_tail(self, block: Block, content: Content) -> None:
        """Make a tail findable, unless another block is found that holds the same: then it has no content."""
        if any(other.startswith(content) for _, other in islice(self._beginning_like(content), MOST_CANDIDATES)):
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

    def _beginning_like(self, content: Content) -> Iterator[tuple[Block, Content]]:
        block = self._newest.get(_beginning(content))
        while block is not None and block.content is not None:
            yield block, block.content
            block = block.older

    def _link(self, block: Block, content: Content) -> None:
        block.content = content
        beginning = _beginning(content)
        block.older = self._newest.get(beginning)
        if block.older is not None:
            block.older.newer = block
        self._newest[beginning] = block


def _beginning(content: Content) -> bytes:
    return content[: _PARENT_BYTES + _TOKEN_BYTES]
