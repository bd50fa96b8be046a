"""A block table's ids stay what its blocks say, however it changes."""

from hypothesis import given, settings
from hypothesis import strategies as st

from model_runner.block_table import BlockTable
from pagekeeper.common.ids import BlockId
from pagekeeper.common.operations import BlockRef

blocks = st.lists(st.builds(BlockRef, st.integers(1, 9).map(BlockId), st.integers(1, 2)), max_size=12)
changes = st.lists(st.tuples(st.booleans(), st.integers(0, 12), blocks), max_size=20)


@settings(max_examples=100, deadline=None)
@given(first=blocks, changes=changes)
def test_ids_follow_every_grant_and_every_rename(
    first: list[BlockRef], changes: list[tuple[bool, int, list[BlockRef]]]
) -> None:
    table, expected = BlockTable(first), list(first)
    for renames, position, change in changes:
        position = min(position, len(expected))
        if renames:
            change = change[: len(expected) - position]
            last = position + len(change)
            assert table.rename(position, change) is (expected[position:last] != change)
            expected[position:last] = change
        else:
            table.resize(position, change)
            expected[position:] = change
        assert table.blocks == expected
        assert table.ids.tolist() == [block.id for block in expected]
        assert len(table) == len(expected)


def test_a_renamed_block_differs_by_its_generation_alone() -> None:
    table = BlockTable([BlockRef(BlockId(3), 1)])
    assert table.rename(0, [BlockRef(BlockId(3), 2)])
    assert table.blocks == [BlockRef(BlockId(3), 2)]
