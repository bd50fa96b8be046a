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

    began, checksum, faults, requests, streams, seconds = time.monotonic(), 0, Counter[str](), 0, 0, 0.0
    for count, report in enumerate(reports(seeds, arguments.jobs), start=1):
        if report.violation is not None:
            print(report)  # noqa: T201 - a program that prints
            print(f"1 violation, after {count} seeds")  # noqa: T201 - a program that prints
            return 1
        checksum ^= report.checksum
        faults += report.faults
        requests, streams = requests + report.num_requests, streams + report.num_streams
        seconds += report.seconds
    took = time.monotonic() - began
    print(f"{requests} requests over {streams} streams in {seconds:.0f} simulated seconds")  # noqa: T201 - prints
    print(f"{faults.total()} faults: {', '.join(f'{n} {kind}' for kind, n in faults.most_common())}")  # noqa: T201 - prints
    print(  # noqa: T201 - a program that prints
        f"{len(seeds)} seeds, 0 violations, {60 * len(seeds) / took:.0f} seeds a minute, checksum {checksum:08x}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
