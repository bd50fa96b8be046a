"""The compile check as a program, on toy kernels that really are compiled."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
TOYS = "tests.unit.bench.gpu_compile_kernels"


def run_check(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    return subprocess.run(
        [sys.executable, "-m", "bench.gpu_compile", *arguments],
        cwd=ROOT,
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """One run over all toys: what it printed, and its builds by name and capability."""
    report = tmp_path_factory.mktemp("gpu_compile") / "report.json"
    result = run_check("--module", TOYS, "--json", str(report))
    assert report.exists(), result.stderr
    builds = json.loads(report.read_text(encoding="utf-8"))
    return result, {f"{build['name']} sm_{build['capability']}": build for build in builds}


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_a_kernel_that_keeps_its_promises_passes_on_every_capability(checked: Any, capability: int) -> None:
    _, builds = checked
    add = builds[f"add aligned sm_{capability}"]
    assert add["failures"] == []
    assert add["figures"]["loads"] == {"16": 2}
    assert add["figures"]["ctas"] == 16


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_a_product_shows_its_matrix_instructions_and_their_memory(checked: Any, capability: int) -> None:
    _, builds = checked
    product = builds[f"product sm_{capability}"]
    assert product["failures"] == []
    instruction = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}[capability]
    assert product["figures"]["matrix"][instruction] > 0
    assert product["figures"]["shared"] >= 2 * 64 * 64 * 2
    assert bool(product["figures"]["tensor_memory"]) == (capability == 100)


@pytest.mark.parametrize(
    ("build", "failure"),
    [
        ("add unaligned sm_90", "narrow loads at gpu_compile_kernels.py:"),
        ("add tiny sm_90", "no tile is large enough to give every thread 16 bytes"),
        ("add without matrix sm_90", "no matrix instruction"),
        ("add crowded sm_90", "16 CTAs a multiprocessor instead of 17, by warps"),
        ("add incomplete sm_90", "must name each of x, y, out, row_stride, columns once"),
        ("add broken sm_90", "does not compile: CompilationError"),
        ("product too large sm_80", "bytes of shared memory; a CTA can have 166912"),
        ("hold spills sm_90", "bytes of stack"),
    ],
)
def test_what_is_wrong_is_named_in_the_report_and_in_print(checked: Any, build: str, failure: str) -> None:
    result, builds = checked
    assert failure in builds[build]["failures"][0]
    assert failure in result.stdout


def test_a_spill_is_counted_in_instructions(checked: Any) -> None:
    _, builds = checked
    figures = builds["hold spills sm_90"]["figures"]
    assert figures["stack"] > 0
    assert figures["spills"] > 0


def test_one_failure_fails_the_check(checked: Any) -> None:
    result, builds = checked
    assert result.returncode == 1
    assert sum(bool(build["failures"]) for build in builds.values()) == 8


def test_a_selection_that_passes_passes() -> None:
    result = run_check("--module", TOYS, "--only", "add aligned", "--capability", "90")
    assert result.returncode == 0, result.stderr
    assert "builds: 1, failed: 0" in result.stdout


def test_a_selection_without_a_kernel_does_not_pass() -> None:
    result = run_check("--module", TOYS, "--only", "no such kernel")
    assert result.returncode == 2
    assert "no kernel configuration matches" in result.stderr


def test_a_name_may_stand_for_one_configuration_on_each_capability_only() -> None:
    result = run_check("--module", TOYS, "--module", TOYS)
    assert result.returncode != 0
    assert "two configurations for sm_80 have the name 'add aligned'" in result.stderr


def test_the_interpreter_is_refused_by_name() -> None:
    result = run_check("--module", TOYS, TRITON_INTERPRET="1")
    assert result.returncode == 2
    assert "TRITON_INTERPRET is set" in result.stderr


def test_a_table_of_a_selection_is_not_written() -> None:
    result = run_check("--module", TOYS, "--write", "docs/gpu.md")
    assert result.returncode == 2
    assert "--write needs all configurations" in result.stderr
