"""Into how many pieces decodes are cut, and with which tiles they are read."""

from dataclasses import replace
from itertools import product

import pytest

from kernels.triton.decode_plan import LEAST_PIECE, DecodeShape, Device, plan_decodes
from kernels.triton.tuning import DECODE, SHARED_PREFIX, find_tiling, padded_dim
from kernels.triton.work_division import count_slots

H200 = Device(capability=90, multiprocessors=132)
LLAMA_8B = DecodeShape(64, 8192, 8, 4, 128, 2, has_shared_prefix=False)


def test_short_contexts_stay_whole_and_need_no_second_kernel() -> None:
    plan = plan_decodes(replace(LLAMA_8B, longest=LEAST_PIECE), H200)
    assert (plan.spare, plan.shares) == (0, 0)
    assert plan_decodes(replace(LLAMA_8B, longest=LEAST_PIECE + 1), H200).spare > 0


def test_one_long_context_fills_the_device() -> None:
    shape = replace(LLAMA_8B, num_sequences=1, longest=131072)
    plan = plan_decodes(shape, H200)
    programs = (1 + plan.spare) * shape.num_kv_heads
    assert programs >= plan.tiling.resident * H200.multiprocessors
    assert programs <= plan.tiling.resident * H200.multiprocessors + 2 * shape.num_kv_heads


def test_pieces_are_no_shorter_than_pays() -> None:
    assert plan_decodes(replace(LLAMA_8B, num_sequences=1, longest=1024), H200).spare == 1024 // LEAST_PIECE


@pytest.mark.parametrize("num_sequences", [1, 2, 8, 64, 256, 1000])
@pytest.mark.parametrize("longest", [300, 8192, 131072])
def test_a_bound_far_beyond_the_lengths_costs_few_programs(num_sequences: int, longest: int) -> None:
    """A graph is captured for the longest context that a model has."""
    plan = plan_decodes(replace(LLAMA_8B, num_sequences=num_sequences, longest=longest), H200)
    assert plan.spare * LLAMA_8B.num_kv_heads <= 4 * (plan.tiling.resident * H200.multiprocessors + 8)


def test_a_shared_prefix_is_cut_to_fill_the_device_too() -> None:
    shape = replace(LLAMA_8B, has_shared_prefix=True)
    plan = plan_decodes(shape, H200)
    row_tiles = shape.num_sequences * shape.group // plan.shared_tiling.rows
    assert plan.spare > 0
    assert plan.shares * row_tiles * shape.num_kv_heads >= plan.shared_tiling.resident * H200.multiprocessors
    assert plan_decodes(replace(shape, longest=100), H200).shares == 1


def test_every_shape_has_tiles_on_every_device() -> None:
    for table, capability in product((DECODE, SHARED_PREFIX), (80, 86, 89, 90, 100, 103, 120)):
        for head_dim, element_bytes in product((16, 64, 80, 96, 128, 192, 256), (1, 2, 4)):
            tiling = find_tiling(table, capability, head_dim, element_bytes)
            assert LEAST_PIECE % tiling.tile == 0


@pytest.mark.parametrize("head_dim", [0, 8, 72, 272])
def test_a_head_dim_without_a_kernel_is_refused(head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"multiple of 16 up to 256, not {head_dim}"):
        padded_dim(head_dim)


def test_few_kernels_serve_all_numbers_of_sequences() -> None:
    assert [count_slots(n) for n in (1, 16, 17, 64, 65, 256, 257, 1024, 1025)] == [
        16,
        16,
        64,
        64,
        256,
        256,
        1024,
        1024,
        4096,
    ]
