"""The kernel checks of the GPU check find what they are for: the specification passes, broken kernels do not."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.gpu_check.attention_case import AttentionRun
from bench.gpu_check.cases import AttentionCase, attention_cases
from kernels import triton
from kernels.interface import AttentionBatch, AttentionParams
from kernels.kv_pool import KvPool
from kernels.reference.paged_attention import ReferenceAttention

README = Path(__file__).parents[3] / "docs" / "gpu" / "README.md"

# The specification takes lengths from the host, which in a captured graph are bounds.
CASES = [case for case in attention_cases(dry_run=True) if not case.graph]
FIRST = CASES[0]


def failures(case: AttentionCase, attention: type[ReferenceAttention] = ReferenceAttention) -> set[str]:
    def prepare(batch: AttentionBatch, pool: KvPool, params: AttentionParams) -> ReferenceAttention:
        return attention(batch, pool, params)

    kernels: Any = SimpleNamespace(prepare_attention=prepare)
    checks = list(AttentionRun(case, "cpu", random.Random(1)).checks(kernels))
    assert len(checks) == 6
    return {check.name.removeprefix(f"{case.name}: ") for check in checks if check.result != "pass"}


def test_the_readme_says_of_every_operation_whether_it_is_a_triton_kernel() -> None:
    rows = [line.split("|") for line in README.read_text().splitlines() if line.count("|") == 4]
    for name in triton.__all__:
        kinds = [row[2] for row in rows if f"`{name}`" in row[1]]
        assert kinds, name
        is_ours = getattr(triton, name).__module__.startswith("kernels.triton.")
        assert any("kernel" in kind for kind in kinds) is is_ours, name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_specification_passes(case: AttentionCase) -> None:
    assert failures(case) == set()


class _LeavesAnElementUnwritten(ReferenceAttention):
    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        result = super().attend(layer, query)
        out = torch.empty_like(result)
        out.view(-1)[1:] = result.view(-1)[1:]
        return out


class _ReadsAnUnusedSlot(ReferenceAttention):
    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        last = self.batch.block_tables[0, 0]
        return super().attend(layer, query) + 0 * self.kv_pool.blocks[last, layer, 0, 0, -1, 0]


class _ForgetsTheScale(ReferenceAttention):
    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        return super().attend(layer, query * 1.01)


class _WritesTheNextSlotToo(ReferenceAttention):
    def rotate_and_store(self, layer: int, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        super().rotate_and_store(layer, qkv, cos, sin)
        block, offset = divmod(int(self.batch.slot_mapping[0]), self.kv_pool.block_size)
        self.kv_pool.blocks[block, layer, 0, 0, offset + 1] = 0


class _StoresUnrotatedKeys(ReferenceAttention):
    def rotate_and_store(self, layer: int, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        super().rotate_and_store(layer, qkv, torch.ones_like(cos), torch.zeros_like(sin))


class _SkipsTheLastToken(ReferenceAttention):
    def rotate_and_store(self, layer: int, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self.batch.slot_mapping[-1] = -1
        super().rotate_and_store(layer, qkv, cos, sin)


@pytest.mark.parametrize(
    ("attention", "expected"),
    [
        (_LeavesAnElementUnwritten, {"attention"}),
        (_ReadsAnUnusedSlot, {"attention", "NaN in unused slots"}),
        (_ForgetsTheScale, {"attention"}),
        (_WritesTheNextSlotToo, {"other slots"}),
        (_StoresUnrotatedKeys, {"rotated Q", "stored K"}),
        (_SkipsTheLastToken, {"stored K", "stored V", "attention"}),
    ],
)
def test_a_broken_kernel_is_found_out(attention: type[ReferenceAttention], expected: set[str]) -> None:
    assert failures(FIRST, attention) == expected


def test_every_kernel_check_has_a_case_on_the_device() -> None:
    on_device: list[AttentionCase] = attention_cases(dry_run=False)
    assert any(case.pool_bytes > 1 << 32 for case in on_device)
    assert any(case.kv_dtype == "float8_e4m3fn" for case in on_device)
    assert any(case.graph for case in on_device)
    assert {case.head_dim for case in on_device} == {64, 80, 96, 128, 256}
    assert {case.num_heads // case.num_kv_heads for case in on_device} >= {1, 3, 5, 6, 7, 8}
    assert len({case.name for case in on_device}) == len(on_device)
