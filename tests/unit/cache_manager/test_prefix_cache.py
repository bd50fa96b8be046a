from array import array
from dataclasses import replace
from hashlib import sha256

from cache_manager.block import Block, Content
from cache_manager.prefix_cache import PrefixCache, block_hash, chain_hashes, root_hash
from pagekeeper.common.ids import BlockHash, BlockId
from pagekeeper.common.operations import Seal
from tests.fakes.local_cache import FINGERPRINT, TINY_LAYOUT
from tests.fakes.policy_session import PolicySession, opening, tiny_policy, tokens

ROOT = root_hash(FINGERPRINT, TINY_LAYOUT)


def _content(token_ids: list[int], tenant: str = "tenant") -> Content:
    return Content(ROOT, tenant, array("I", token_ids))


def test_the_root_covers_every_field_of_fingerprint_and_layout() -> None:
    roots = {
        ROOT,
        root_hash(replace(FINGERPRINT, weights="other"), TINY_LAYOUT),
        root_hash(replace(FINGERPRINT, model_config="other"), TINY_LAYOUT),
        root_hash(replace(FINGERPRINT, compute_dtype="other"), TINY_LAYOUT),
        root_hash(FINGERPRINT, replace(TINY_LAYOUT, head_dim=8)),
        root_hash(FINGERPRINT, replace(TINY_LAYOUT, dtype="float16")),
        root_hash(replace(FINGERPRINT, model_config="tinyrandom", weights=""), TINY_LAYOUT),
        root_hash(replace(FINGERPRINT, model_config="", weights="tinyrandom"), TINY_LAYOUT),
    }
    assert len(roots) == 8


def test_a_hash_depends_on_everything_before_the_block() -> None:
    first = list(chain_hashes(ROOT, "tenant", tokens(3), 8))
    second = list(chain_hashes(ROOT, "tenant", [99, *tokens(3)[1:]], 8))
    assert len(set(first) | set(second)) == 6
    assert list(chain_hashes(first[0], "tenant", tokens(3)[8:], 8)) == first[1:]


def test_a_partial_block_has_no_hash() -> None:
    assert list(chain_hashes(ROOT, "tenant", tokens(0.5), 8)) == []
    assert len(list(chain_hashes(ROOT, "tenant", tokens(1.5), 8))) == 1


def test_a_hash_is_sha256_over_tagged_length_prefixed_fields() -> None:
    parent = bytes(range(32))
    fields = b"\x06parent" + (32).to_bytes(8, "little") + parent
    fields += b"\x06tenant" + (1).to_bytes(8, "little") + b"t"
    fields += b"\x06tokens" + (8).to_bytes(8, "little") + b"\1\0\0\0\2\0\0\0"
    assert block_hash(BlockHash(parent), "t", [1, 2]) == sha256(fields).digest()


def test_case_05_pairs_of_tenant_and_tokens_that_concatenate_alike_share_no_block() -> None:
    """Case 5: hash-field confusion."""
    pairs = [
        ("", [ord("a"), *range(7)]),
        ("a", [*range(7), 0]),
        ("a\0\0\0", list(range(8))),
        ("a\0\0\0\0\0\0\0", list(range(8))),
        ("tenant", [1, 0x01020304, 0, 0, 0, 0, 0, 0]),
        ("tenant\1\0\0\0", [0x01020304, 0, 0, 0, 0, 0, 0, 0]),
        ("parent", list(range(8))),
        ("tokens", list(range(8))),
    ]
    policy = tiny_policy(64)
    session = PolicySession(policy)
    for index, (tenant, token_ids) in enumerate(pairs):
        opened = session.do(opening(index, token_ids, tenant))
        assert opened.num_cached_tokens == 0
        session.do(Seal(index, token_ids, opened.blocks))
    assert policy.stats().counters.folds == 0
    assert policy.stats().pool.sealed_blocks == len(pairs)
    for index, (tenant, token_ids) in enumerate(pairs):
        assert session.do(opening(100 + index, token_ids, tenant)).num_cached_tokens == 8


def test_the_longest_prefix_ends_at_the_first_block_that_is_missing() -> None:
    cache = PrefixCache()
    hashes = list(chain_hashes(ROOT, "tenant", tokens(4), 8))
    blocks = [Block(BlockId(index + 1)) for index in range(4)]
    for index in (0, 1, 3):
        cache.add(blocks[index], _content(tokens(1)), hashes[index])
    assert cache.longest_prefix(iter(hashes), 4) == blocks[:2]
    assert cache.longest_prefix(iter(hashes), 1) == blocks[:1]
    assert cache.longest_prefix(iter(hashes), 0) == []


def test_hashes_after_a_miss_are_not_computed() -> None:
    hashes = chain_hashes(ROOT, "tenant", tokens(4), 8)
    assert PrefixCache().longest_prefix(hashes, 4) == []
    assert len(list(hashes)) == 3


def test_a_removed_block_is_not_found() -> None:
    cache = PrefixCache()
    block = Block(BlockId(1))
    cache.add(block, _content(tokens(1)), ROOT)
    assert cache.find(ROOT) is block
    cache.remove(block)
    assert cache.find(ROOT) is None
    assert block.hash is None
    assert len(cache) == 0
