"""The report: JSON that is whole after every check, and a table at the end. Standard library alone."""

import json
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.gpu_check.task import NEEDS_DEVICE, Check

JSON_NAME, TABLE_NAME = "report.json", "report.txt"
DRY_RUN, DEVICE = "dry run, no device: says nothing about a GPU", "device"


class Report:
    """Everything found out so far.

    Args:
        folder: of the two files.
        dry_run: no device takes part; both files say so.
        seed: of all random inputs.
        started: wall-clock time of the run, as text.
    """

    def __init__(self, folder: Path, dry_run: bool, seed: int, started: str) -> None:
        self._folder = folder
        self.dry_run = dry_run
        self.seed = seed
        self._head: dict[str, Any] = {
            "kind": DRY_RUN if dry_run else DEVICE,
            "started": started,
            "seed": seed,
            "python": platform.python_version(),
            "commit": _commit(),
        }
        self._checks: dict[str, list[Check]] = {}
        self._seconds: dict[str, float] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, section: str, check: Check) -> None:
        """Take in one check and write the JSON."""
        self._checks.setdefault(section, []).append(check)
        self._write()

    def end_section(self, section: str, seconds: float) -> None:
        """Note how long a section took."""
        self._seconds[section] = round(seconds, 1)
        self._write()

    def facts(self, section: str) -> dict[str, float]:
        """The numbers of a section's checks by name."""
        return {check.name: check.value for check in self._checks.get(section, []) if check.value is not None}

    @property
    def complete(self) -> bool:
        """Nothing failed and nothing was left out, but for what a dry run leaves out by its nature."""
        return all(
            check.result in ("pass", "recorded") or (self.dry_run and check.reason == NEEDS_DEVICE)
            for check in self._all()
        )

    def table(self) -> str:
        """All checks as text, under a line that says what kind of run this was."""
        lines = [f"GPU check: {self._head['kind']}", "  ".join(f"{k} {v}" for k, v in list(self._head.items())[1:]), ""]
        rows = [("section", "check", "figure", "bound", "result")]
        for section, checks in self._checks.items():
            rows += [(section, check.name, check.figure, check.bound, _verdict(check)) for check in checks]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        lines += ["", "seconds: " + "  ".join(f"{name} {value:g}" for name, value in self._seconds.items())]
        results = [check.result for check in self._all()]
        counts = {result: results.count(result) for result in ("pass", "fail", "recorded", "not run")}
        lines.append("  ".join(f"{result}: {count}" for result, count in counts.items()))
        lines.append(f"This was a {self._head['kind']}." if self.dry_run else "This was a run on a device.")
        return "\n".join(lines) + "\n"

    def finish(self) -> None:
        """Write the table."""
        (self._folder / TABLE_NAME).write_text(self.table())

    def _all(self) -> Iterable[Check]:
        return (check for checks in self._checks.values() for check in checks)

    def _write(self) -> None:
        sections = {
            name: {"seconds": self._seconds.get(name), "checks": [asdict(check) for check in checks]}
            for name, checks in self._checks.items()
        }
        temporary = self._folder / f"{JSON_NAME}.new"
        temporary.write_text(json.dumps(self._head | {"complete": self.complete, "sections": sections}, indent=1))
        temporary.rename(self._folder / JSON_NAME)


def _verdict(check: Check) -> str:
    return f"{check.result}: {check.reason}" if check.reason else check.result


def _commit() -> str:
    """What git says of the code; empty where there is no git or no repository."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
