"""Compile every shipped kernel configuration for the GPUs it ships for; see `python -m bench.gpu_compile --help`."""

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

import triton

from bench.gpu_compile import report
from bench.gpu_compile.jobs import Job, jobs_for, kernel_modules
from bench.gpu_compile.multiprocessor import MULTIPROCESSORS

_CACHE = Path(__file__).parents[2] / "build" / "triton-cache"
_MOST_WORKERS = 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; the exit code is 0 if all builds pass, 1 if one fails, 2 if nothing could be compiled."""
    options = _parse(arguments)
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        print("TRITON_INTERPRET is set: kernels would be interpreted, not compiled; unset it", file=sys.stderr)
        return 2
    os.environ.setdefault("TRITON_CACHE_DIR", str(_CACHE))
    # Triton's default, said aloud: from 3.9 on it warns otherwise.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    began = time.monotonic()
    jobs = list(jobs_for(options.module or kernel_modules(), set(options.capability), options.only))
    if not jobs:
        print("no kernel configuration matches", file=sys.stderr)
        return 2
    builds = []
    workers = min(os.cpu_count() or 1, _MOST_WORKERS, len(jobs))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for result in pool.map(Job.run, jobs):
            print(report.line(result), flush=True)
            builds.append(result)
    failed = [result for result in builds if result.failures]
    print(f"\nbuilds: {len(builds)}, failed: {len(failed)}, seconds: {time.monotonic() - began:.0f}")
    for result in failed:
        print(report.verdict(result))
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in builds], indent=1), encoding="utf-8")
    if options.write and not failed:
        report.replace_table(options.write, report.markdown(builds, triton.__version__))
    return 1 if failed else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_compile", description=__doc__)
    parser.add_argument(
        "--capability",
        type=int,
        action="append",
        choices=sorted(MULTIPROCESSORS),
        help="only for this compute capability; may be repeated",
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="only configurations whose name has TEXT in it")
    parser.add_argument(
        "--module",
        action="append",
        help="take configurations from here instead of kernels.triton",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--write", type=Path, metavar="FILE", help="if all pass, replace the table in this document")
    options = parser.parse_args(arguments)
    if options.write and (options.capability or options.only or options.module):
        parser.error("--write needs all configurations: use it alone")
    options.capability = options.capability or sorted(MULTIPROCESSORS)
    return options


if __name__ == "__main__":
    sys.exit(main())
