"""`python -m tests.simulation`: simulate many seeds, and show the first that goes wrong."""

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator

from tests.simulation.run import Report, run


def reports(seeds: range, jobs: int) -> Iterator[Report]:
    """Of every seed, in order."""
    if jobs == 1:
        yield from map(run, seeds)
        return
    with multiprocessing.Pool(jobs) as pool:
        yield from pool.imap(run, seeds, chunksize=20)


def simulate(seeds: range, jobs: int) -> tuple[str, int]:
    """What there is to print, and the exit code."""
    began, checksum, faults, counts = time.monotonic(), 0, Counter[str](), Counter[str]()
    for number, report in enumerate(reports(seeds, jobs), start=1):
        if report.violation is not None:
            return f"{report}\n1 violation, after {number} seeds", 1
        checksum ^= report.checksum
        faults += report.faults
        counts += Counter(requests=report.num_requests, streams=report.num_streams, bounded=report.num_bounded)
    rate = 60 * len(seeds) / (time.monotonic() - began)
    requests = f"{counts['requests']} requests over {counts['streams']} streams"
    kinds = ", ".join(f"{count} {kind}" for kind, count in faults.most_common())
    lines = (
        f"{requests}, {counts['bounded']} sequences went on elsewhere and computed no more again than they may",
        f"{faults.total()} faults: {kinds}",
        f"{len(seeds)} seeds, 0 violations, {rate:.0f} seeds a minute, checksum {checksum:08x}",
    )
    return "\n".join(lines), 0


def main() -> int:
    """Simulate; exit 1 at the first violation."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=1, help="the first one; the others follow it")
    parser.add_argument("--jobs", type=int, default=1, help="processes to share the work")
    parser.add_argument("--trace", action="store_true", help="print every event")
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    if arguments.trace:
        for seed in seeds:
            print(run(seed, echo=print))  # noqa: T201 - a program that prints
        return 0
    text, code = simulate(seeds, arguments.jobs)
    print(text)  # noqa: T201 - a program that prints
    return code


if __name__ == "__main__":
    sys.exit(main())
