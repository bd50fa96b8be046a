"""The compile check's parts that need no compiler: occupancy, what machine code says, the table."""

from collections import Counter
from pathlib import Path

import pytest

from bench.gpu_compile.build import Build, Figures
from bench.gpu_compile.machine_code import (
    CubinUsage,
    Site,
    count_spills,
    load_widths,
    main_streams,
    matrix_instructions,
    parse_resource_usage,
)
from bench.gpu_compile.multiprocessor import Occupancy, Resources, occupancy
from bench.gpu_compile.report import markdown, replace_table

KIB = 1024

RESOURCE_USAGE = """
Resource usage:
 Common:
  GLOBAL:0
 Function decode:
  REG:96 STACK:16 SHARED:1024 LOCAL:8 CONSTANT[0]:600 TEXTURE:0 SURFACE:0 SAMPLER:0
"""

# As triton 3.9 writes it: each line of inline assembly has a place of its own, counted on from the load's.
PTX = """
	.loc	1 11 10                         // decode.py:11:10
	// begin inline asm
	.loc	1 11 10                         // decode.py:11:10
	mov.u32 %r51, 0x0;
	.loc	1 12 10                         // decode.py:12:10
	@%p1 ld.global.L1::evict_first.v4.b32 { %r51, %r52, %r53, %r54 }, [ %rd5 + 0 ];

	// end inline asm
	// begin inline asm
	ld.global.b16 { %rs1 }, [ %rd6 + 0 ];
	// end inline asm
	.loc	1 30 5, function_name $L__info_string0, inlined_at 1 12 9 // decode.py:30:5
	cp.async.cg.shared.global [ %r60 + 0 ], [ %rd8 + 0 ], 0x10, %r61;
	@%p1 cp.async.ca.shared.global [ %r85 + 0 ], [ %rd7 + 0 ], 0x4, %r59;
	cp.async.commit_group;
	ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r5];
	ld.param.b64 %rd1, [decode_param_0];
	mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r174 }, { %r166 }, { %r170 }, { %r174 };
	st.global.v4.b32 [ %rd9 + 0 ], { %r1, %r2, %r3, %r4 };
	.file	1 "/somewhere/decode.py"
"""

TTGIR = """
#loc = loc("/somewhere/decode.py":9:1)
    %b = tt.load %b_40, %acc_43, %cst : tensor<64x!tt.ptr<i64>, #blocked> loc(#loc7)
    %q = tt.load %q_28 {contiguity = 8 : i32} : tensor<16x64x!tt.ptr<bf16>, #blocked1> loc(#loc5)
    %k = ttg.async_copy_global_to_local %kk_59, %kk_61 mask %m other %cst_5 : tensor<32x128x!tt.ptr<f8E4M3FN>, \
#blocked1> -> <32x128xf8E4M3FN, #shared, #smem, mutable> loc(#loc9)
    tt.store %2, %11 : tensor<64x128x!tt.ptr<bf16>, #blocked> loc(#loc1)
#loc1 = loc("/somewhere/decode.py":16:5)
#loc2 = loc("/somewhere/decode.py":11:10)
#loc3 = loc("/somewhere/decode.py":30:5)
#loc4 = loc("/somewhere/decode.py":12:9)
#loc5 = loc("q"(#loc2))
#loc6 = loc("tile"(#loc3))
#loc7 = loc("/somewhere/decode.py":14:13)
#loc8 = loc("k"(#loc4))
#loc9 = loc(callsite(#loc6 at #loc8))
"""


@pytest.mark.parametrize(
    ("capability", "resources", "expected"),
    [
        # 128 threads of 128 registers are 16,384: four CTAs share 65,536.
        (90, Resources(128, 0, 0, 4), Occupancy(4, "registers")),
        # 97 registers count as 104; a quarter of the registers holds 16,384 // 3,328 = 4 warps, so 16 in all.
        (90, Resources(97, 0, 0, 4), Occupancy(4, "registers")),
        (90, Resources(96, 0, 0, 4), Occupancy(5, "registers")),
        # 39 KiB and the system's 1 KiB: five times 40 fit in 228 KiB, four times in 164.
        (90, Resources(72, 39 * KIB, 0, 4), Occupancy(5, "shared memory")),
        (80, Resources(72, 39 * KIB, 0, 4), Occupancy(4, "shared memory")),
        (90, Resources(32, 0, 0, 8), Occupancy(8, "registers")),
        (90, Resources(24, 0, 0, 8), Occupancy(8, "warps")),
        (90, Resources(24, 0, 0, 1), Occupancy(32, "CTA slots")),
        (80, Resources(32, 163 * KIB, 0, 4), Occupancy(1, "shared memory")),
        (80, Resources(32, 163 * KIB + 1, 0, 4), Occupancy(0, "shared memory")),
        (90, Resources(255, 0, 0, 16), Occupancy(0, "registers")),
        (100, Resources(32, 0, 256, 4), Occupancy(2, "tensor memory")),
    ],
)
def test_occupancy_is_what_the_scarcest_resource_allows(
    capability: int, resources: Resources, expected: Occupancy
) -> None:
    assert occupancy(capability, resources) == expected


def test_resource_usage_is_read_from_what_cuobjdump_prints() -> None:
    assert parse_resource_usage(RESOURCE_USAGE) == CubinUsage(registers=96, stack=16, local=8)


def test_resource_usage_of_no_kernel_is_an_error() -> None:
    with pytest.raises(ValueError, match="of one kernel, not of 0"):
        parse_resource_usage("cuobjdump info: no device code")


def test_spills_are_the_instructions_on_local_memory() -> None:
    assert count_spills("STL [R1], R2;\nLDL.LU R2, [R1];\nLDG.E R3, [R4];") == 2


def test_loads_are_counted_by_the_source_they_come_from() -> None:
    assert load_widths(PTX) == {
        Site("decode.py", 11, 10): Counter({16: 1, 2: 1}),
        Site("decode.py", 30, 5): Counter({16: 1, 4: 1}),
    }


def test_matrix_instructions_are_counted_by_kind() -> None:
    assert matrix_instructions(PTX + "wgmma.mma_async.sync.aligned.m64n64k16\ntcgen05.mma.cta_group::1.kind::f16") == {
        "mma.sync": 1,
        "wgmma.mma_async": 1,
        "tcgen05.mma": 1,
    }


def test_main_streams_are_the_tiles_that_feed_every_thread() -> None:
    assert main_streams(TTGIR, num_warps=4) == {Site("decode.py", 11, 10), Site("decode.py", 30, 5)}
    assert main_streams(TTGIR, num_warps=8) == {Site("decode.py", 30, 5)}
    assert main_streams(TTGIR, num_warps=16) == set()


def built(name: str, capability: int, registers: int) -> Build:
    figures = Figures(
        registers=registers,
        stack=0,
        local=0,
        spills=0,
        shared=39424,
        tensor_memory=0,
        ctas=5,
        limited_by="shared memory",
        loads={4: 5, 16: 34},
        matrix={"mma.sync": 32},
    )
    return Build(name, capability, 0.5, figures)


def test_the_table_has_a_row_for_each_configuration() -> None:
    table = markdown([built("decode", 80, 72), built("decode", 90, 96), built("copy", 90, 32)], "3.9.0")
    assert table.splitlines()[-4:] == [
        "| configuration | sm_80 | sm_90 |",
        "| --- | --- | --- |",
        "| decode | 72 / 38.5 / 5 mma.sync | 96 / 38.5 / 5 mma.sync |",
        "| copy | - | 32 / 38.5 / 5 mma.sync |",
    ]


def test_the_table_replaces_what_is_between_the_markers_and_nothing_else(tmp_path: Path) -> None:
    document = tmp_path / "gpu.md"
    before, after = "# GPU\n\n<!-- gpu-compile begin -->", "<!-- gpu-compile end -->\nmore, no newline"
    document.write_bytes(f"{before}\nold\n\n| table |\n{after}".encode())
    replace_table(document, "new")
    replace_table(document, "newer")
    assert document.read_bytes() == f"{before}\nnewer\n{after}".encode()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<!-- gpu-compile begin -->",
        "<!-- gpu-compile end --> <!-- gpu-compile begin -->",
        "<!-- gpu-compile begin --> <!-- gpu-compile begin --> <!-- gpu-compile end -->",
        "<!-- gpu-compile begin --> <!-- gpu-compile end --> <!-- gpu-compile end -->",
    ],
)
def test_a_document_without_its_two_markers_is_left_alone(tmp_path: Path, text: str) -> None:
    document = tmp_path / "gpu.md"
    document.write_text(text)
    with pytest.raises(ValueError, match="once each"):
        replace_table(document, "new")
    assert document.read_text() == text
