"""Finding blocks by their content: the chain hash and the index over it.

A block's hash covers its own tokens and, through its parent's hash, everything before them; at the root stand the
fingerprint and the layout. Two blocks of one pool with equal hashes therefore hold the same bytes.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, fields
from hashlib import sha256
from itertools import islice

from cache_manager.block import Block
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


class PrefixCache:
    """The index from hash to the one block that is found by it: SEALED, or FREE and not yet reused."""

    def __init__(self) -> None:
        self._blocks: dict[BlockHash, Block] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, block_hash: BlockHash) -> Block | None:
        """The block with this content, if there is one."""
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

    def add(self, block: Block, block_hash: BlockHash) -> None:
        """Make `block` findable. There must be no block with this hash."""
        block.hash = block_hash
        self._blocks[block_hash] = block

    def remove(self, block: Block) -> None:
        """Forget the content of a cached block."""
        if block.hash is not None:
            del self._blocks[block.hash]
            block.hash = None
