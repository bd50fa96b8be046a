"""`python -m bench.gpu_check`, or `make gpu-check`: prove on a GPU what only a GPU can show. See docs/gpu/README.md.

Exit codes: 0 every check ran and none failed; 1 one failed or was not run; 2 there is no CUDA device, a dry run was
done instead and shows nothing about one. With `--dry-run`, 0 means that whatever a CPU can do passed.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from bench.gpu_check import wheels
from bench.gpu_check.report import Report
from bench.gpu_check.scratch import remove_leftovers
from bench.gpu_check.supervise import Section, SectionRun, run_side_by_side
from bench.gpu_check.task import Check
from pagekeeper.common.cuda_probe import CudaUnavailable, probe_cuda

SECTIONS = [
    Section("facts", "bench.gpu_check.facts", 20),
    Section("kernels", "bench.gpu_check.kernel_checks", 60, num_processes=4),
    Section("bandwidth", "bench.gpu_check.bandwidth", 45),
    Section("serve", "bench.gpu_check.serving", 95),
    Section("ipc", "bench.gpu_check.sharing", 60),
    Section("exchange", "bench.gpu_check.exchange", 10),
    Section("vmm", "bench.gpu_check.sharing_vmm", 35),
    Section("extras", "bench.gpu_check.extras", 15),
]
"""In order of value, the promised figures early. Their limits fit into the budget, so no section takes another's time;
what one has left over is the next one's."""

BUDGET_S = 345.0
EXIT_INCOMPLETE, EXIT_NO_DEVICE = 1, 2
END_S = 5.0
"""Kept back for the end of the last section and the table."""


def main(arguments: Sequence[str] | None = None, sections: Sequence[Section] = SECTIONS) -> int:
    """Run the sections; returns the exit code."""
    began = time.monotonic()
    options = _parse(arguments, [section.name for section in sections])
    missing = None if options.dry_run else _missing_device()
    if missing:
        print(f"gpu-check: no CUDA device: {missing}; this is a dry run", file=sys.stderr, flush=True)
    dry_run = options.dry_run or bool(missing)
    report = Report(options.out, dry_run, options.seed, time.strftime("%Y-%m-%d %H:%M:%S%z"))
    end = began + options.budget_s - END_S
    chosen = [section for section in sections if not options.only or section.name in options.only]
    with tempfile.TemporaryDirectory(prefix="pk-wheels-") as packages, (options.out / "log.txt").open("wb") as log:
        if options.wheels:
            wheels.unpack(options.wheels, Path(packages))
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [packages, os.environ.get("PYTHONPATH")]))
        for section in sections:
            if section not in chosen:
                report.add(section.name, Check(section.name, "not run", reason="--only names others"))
                continue
            later = chosen[chosen.index(section) + 1 :]
            section_end = end_of(section, later, time.monotonic(), end)
            _run(section, report, section_end, ["--dry-run"] * dry_run + ["--seed", str(options.seed)], log)
    report.finish()
    print("\n" + report.table())
    if missing:
        print("gpu-check: no CUDA device was there: nothing was shown about one", file=sys.stderr)
        return EXIT_NO_DEVICE
    return 0 if report.complete else EXIT_INCOMPLETE


def end_of(section: Section, later: Sequence[Section], now: float, end: float) -> float:
    """When a section that begins now is ended: it has its limit, and what the sections after it do not need."""
    spare = end - sum(other.limit_s for other in later)
    return min(end, max(now + section.limit_s, spare))


def _run(section: Section, report: Report, end: float, flags: list[str], log: IO[bytes]) -> None:
    began = time.monotonic()
    num_shares = 1 if report.dry_run else section.num_processes
    flags = [*flags, "--facts", json.dumps(report.facts("facts"))]
    shares = [["--share", str(i), str(num_shares)] for i in range(num_shares)]
    for check in run_side_by_side([SectionRun(section, end, flags + share, log) for share in shares]):
        report.add(section.name, check)
        words = filter(None, [f"{check.result:8}", section.name, check.name, check.figure, check.reason])
        print("  ".join(words), flush=True)
    remove_leftovers(report.seed)
    report.end_section(section.name, time.monotonic() - began)


def _missing_device() -> str:
    """Why no device can be used here; empty if one can."""
    found = probe_cuda()
    return str(found) if isinstance(found, CudaUnavailable) else ""


def _parse(arguments: Sequence[str] | None, names: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="only what a CPU can do")
    parser.add_argument("--only", action="append", choices=names, help="only this section; may be repeated")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="end within so many seconds")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32), help="of all inputs")
    out = Path(os.environ.get("OUT") or "build/gpu-check")
    parser.add_argument("--out", type=Path, default=out, help="folder of the report; default: $OUT or build/gpu-check")
    brought = os.environ.get("WHEELS")
    parser.add_argument(
        "--wheels",
        type=Path,
        default=Path(brought) if brought else None,
        help="folder with wheels of packages that this interpreter lacks; default: $WHEELS",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
