"""The GPU path, as far as a machine without a GPU can show it; what only a device shows is in `make gpu-check`."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from bench.promise import Outcome, Promise, Workbench
from bench.promises.tested import promise

_KERNELS = "tests/unit/kernels/triton"
_CACHE_MANAGER = "tests/unit/cache_manager"


def kernels_compile(bench: Workbench) -> Outcome:
    builds = compiled(bench)
    failed = [build["name"] for build in builds if build["failures"]]
    capabilities = Counter(build["capability"] for build in builds)
    counts = ", ".join(f"{count} for sm_{capability}" for capability, count in sorted(capabilities.items()))
    return Outcome(f"{len(failed)} of {len(builds)} fail ({counts})", "none; sm_80, sm_90, sm_100", not failed)


def decode_attention_fits(bench: Workbench) -> Outcome:
    figures = [
        build["figures"]
        for build in compiled(bench)
        if build["capability"] == 90 and build["name"].startswith("decode_attention head_dim=128 bf16")
    ]
    spills, local, stack = (sum(figure[name] for figure in figures) for name in ("spills", "local", "stack"))
    ctas = min((figure["ctas"] for figure in figures), default=0)
    return Outcome(
        f"{len(figures)} configurations: {spills} spills, {local + stack} bytes of local memory, at least {ctas} CTAs",
        "0, 0, >= 2",
        bool(figures) and spills == local == stack == 0 and ctas >= 2,
    )


def compiled(bench: Workbench) -> list[dict[str, Any]]:
    """What `make gpu-compile` found, run once."""
    report: Path = bench.folder / "gpu-compile.json"
    if not report.exists():
        command = [sys.executable, "-m", "bench.gpu_compile", "--json", str(report)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not report.exists():
            raise RuntimeError(f"gpu_compile: exit code {done.returncode}: {done.stderr}")
    builds: list[dict[str, Any]] = json.loads(report.read_text())
    return builds


_SET_UPS = [
    "tests/unit/common/test_cuda_probe.py",
    "tests/unit/cli/test_device.py",
    "tests/unit/model_runner/test_choose_device.py",
    *(f"{_CACHE_MANAGER}/test_{name}.py" for name in ("cuda_ipc", "cuda_pools", "cuda_session", "shared_pool")),
]

PROMISES = [
    promise("Triton kernels, interpreted, agree with the reference", _KERNELS),
    Promise("every kernel configuration compiles without a spill and within shared memory", kernels_compile),
    Promise("decode attention, head_dim 128 bf16 on sm_90: no spill, two CTAs a multiprocessor", decode_attention_fits),
    promise(
        "the whole server on interpreted Triton kernels answers as on the reference",
        "tests/integration/test_triton_interpreted.py",
    ),
    promise("wrong GPU set-ups are named: driver, GPU, PID namespace, pool size, two devices", *_SET_UPS),
]
