from dataclasses import replace
from hashlib import sha256

from cache_manager.block import Block
from cache_manager.prefix_cache import (
    MOST_CANDIDATES,
    PartialHit,
    PrefixCache,
    chain,
    content_of,
    root_hash,
    tenant_root,
)
from pagekeeper.common.ids import BlockHash, BlockId
from pagekeeper.common.operations import Seal
from tests.fakes.local_cache import FINGERPRINT, TINY_LAYOUT
from tests.fakes.policy_session import PolicySession, opening, tiny_policy, tokens

ROOT = root_hash(FINGERPRINT, TINY_LAYOUT)
CONTENT = content_of(ROOT, tokens(1))


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
    first = list(chain(ROOT, "tenant", tokens(3), 8))
    second = list(chain(ROOT, "tenant", [99, *tokens(3)[1:]], 8))
    assert len({block_hash for block_hash, _ in first + second}) == 6
    assert list(chain(first[0][0], "tenant", tokens(3)[8:], 8)) == first[1:]


def test_a_partial_block_has_no_hash() -> None:
    assert list(chain(ROOT, "tenant", tokens(0.5), 8)) == []
    assert len(list(chain(ROOT, "tenant", tokens(1.5), 8))) == 1


def test_a_hash_is_sha256_over_tagged_length_prefixed_fields() -> None:
    parent = bytes(range(32))
    fields = b"\x06parent" + (32).to_bytes(8, "little") + parent
    fields += b"\x06tenant" + (1).to_bytes(8, "little") + b"t"
    fields += b"\x06tokens" + (8).to_bytes(8, "little") + b"\1\0\0\0\2\0\0\0"
    content = parent + b"\1\0\0\0\2\0\0\0"
    assert list(chain(BlockHash(parent), "t", [1, 2], 2)) == [(sha256(fields).digest(), content)]


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
    chained = list(chain(ROOT, "tenant", tokens(4), 8))
    blocks = [Block(BlockId(index + 1)) for index in range(4)]
    for index in (0, 1, 3):
        block_hash, content = chained[index]
        cache.add(blocks[index], content, block_hash)
    assert cache.longest_prefix(iter(chained), 4) == blocks[:2]
    assert cache.longest_prefix(iter(chained), 1) == blocks[:1]
    assert cache.longest_prefix(iter(chained), 0) == []


def test_hashes_after_a_miss_are_not_computed() -> None:
    chained = chain(ROOT, "tenant", tokens(4), 8)
    assert PrefixCache().longest_prefix(chained, 4) == []
    assert len(list(chained)) == 3


def test_a_removed_block_is_not_found() -> None:
    cache = PrefixCache()
    block = Block(BlockId(1))
    cache.add(block, CONTENT, ROOT)
    assert cache.find(ROOT) is block
    cache.remove(block)
    assert cache.find(ROOT) is None
    assert cache.partial_hit(CONTENT) is None
    assert block.hash is None
    assert len(cache) == 0


# Beginnings


def _tails(*lists: list[int]) -> tuple[PrefixCache, list[Block]]:
    cache, blocks = PrefixCache(), [Block(BlockId(index + 1)) for index in range(len(lists))]
    for block, token_ids in zip(blocks, lists, strict=True):
        cache.add_tail(block, content_of(ROOT, token_ids))
    return cache, blocks


def test_the_longest_common_beginning_wins_and_of_equal_ones_the_newest() -> None:
    cache, blocks = _tails([1, 2], [1, 2, 3, 4], [1, 2, 3, 5], [2, 2, 3])
    assert cache.partial_hit(content_of(ROOT, [1, 2, 3, 4, 9])) == PartialHit(blocks[1], 4)
    assert cache.partial_hit(content_of(ROOT, [1, 2, 3, 9])) == PartialHit(blocks[2], 3)
    assert cache.partial_hit(content_of(ROOT, [1, 2])) == PartialHit(blocks[2], 2)
    assert cache.partial_hit(content_of(ROOT, [2])) == PartialHit(blocks[3], 1)


def test_other_tokens_no_tokens_and_another_parent_begin_like_nothing() -> None:
    cache, _ = _tails([1, 2, 3, 4])
    assert cache.partial_hit(content_of(ROOT, [2])) is None
    assert cache.partial_hit(content_of(ROOT, [257])) is None
    assert cache.partial_hit(content_of(ROOT, [])) is None
    assert cache.partial_hit(content_of(tenant_root(ROOT, "other"), [1, 2, 3, 4])) is None


def test_a_tail_that_is_found_elsewhere_is_not_kept() -> None:
    cache, (longer, _, shorter, equal, different) = _tails([1, 2, 3], [4], [1, 2], [1, 2, 3], [1, 3])
    assert shorter.content is equal.content is None
    assert None not in (longer.content, different.content)
    assert len(cache) == 3


def test_removed_blocks_leave_the_others_found_from_wherever_they_stood() -> None:
    for gone in ([0], [1], [2], [2, 1], [0, 2], [1, 0]):
        cache, blocks = _tails([1, 5], [1, 6], [1, 7])
        for index in gone:
            cache.remove(blocks[index])
        for index, block in enumerate(blocks):
            found = cache.partial_hit(content_of(ROOT, [1, 5 + index]))
            assert (found == PartialHit(block, 2)) == (index not in gone)
            assert cache.is_linked(block) == (index not in gone)


def test_only_so_many_of_a_popular_beginning_are_compared() -> None:
    cache, blocks = _tails(*[[1, index] for index in range(MOST_CANDIDATES + 1)])
    assert cache.partial_hit(content_of(ROOT, [1, 1])) == PartialHit(blocks[1], 2)
    assert cache.partial_hit(content_of(ROOT, [1, 0])) == PartialHit(blocks[-1], 1)
