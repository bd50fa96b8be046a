"""Reports as a table for people, as Markdown for the documentation, and as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from bench.chaos.report import Report
from bench.promise import Outcome

COLUMNS = (
    "campaign",
    "faults",
    "streams",
    "lost",
    "tokens lost / doubled",
    "equal text",
    "computed again",
    "next token after",
    "NOT_SERVING",
    "result",
)


@dataclass(frozen=True)
class Row:
    """One line of the table, and what is wrong with it."""

    cells: list[str]
    complaints: list[str]


def row_of(report: Report) -> Row:
    """A campaign's row. A figure with a bound stands before it."""
    complaints = report.complaints()
    cells = [
        report.name,
        _faults(report),
        str(report.num_whole + len(report.errors)),
        str(len(report.errors)),
        f"{report.lost_tokens} / {report.doubled_tokens}",
        _equal(report),
        _again(report),
        _pause(report),
        _health(report),
        "FAIL" if complaints else "pass",
    ]
    return Row(cells, complaints)


def describe(report: Report) -> str:
    """The figures of a row in words."""
    return (
        f"{_faults(report)}: {len(report.errors)} of {report.num_whole + len(report.errors)} streams lost, "
        f"{report.lost_tokens} tokens lost, {report.doubled_tokens} doubled, {_equal(report)} equal; next token after "
        f"{_pause(report)}; NOT_SERVING {_health(report)}"
    )


def row_of_outcome(name: str, outcome: Outcome) -> Row:
    """The row of what is no campaign of streams: its figure stands under "faults"."""
    cells = [name, f"{outcome.figure} ({outcome.bound})", *[""] * (len(COLUMNS) - 3), _result(outcome.passed)]
    return Row(cells, [] if outcome.passed else [outcome.figure])


def table(rows: Sequence[Row]) -> Table:
    """For a terminal."""
    shown = Table(*COLUMNS, title="What survives")
    for row in rows:
        shown.add_row(*row.cells)
    return shown


def markdown(rows: Sequence[Row]) -> str:
    """For docs/reliability.md."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *(row.cells for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_json(path: Path, seed: int, reports: Sequence[Report], rows: Sequence[Row]) -> None:
    """Keep everything that was found out so far."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"seed": seed, "rows": [asdict(row) for row in rows], "reports": [asdict(report) for report in reports]}
    path.write_text(json.dumps(content, indent=2))


def read_json(path: Path) -> list[Row]:
    """The rows of an earlier run."""
    return [Row(row["cells"], row["complaints"]) for row in json.loads(path.read_text())["rows"]]


def _faults(report: Report) -> str:
    if len(report.faults) > 6:
        return f"{sum(report.faults.values())} of {len(report.faults)} kinds"
    return ", ".join(f"{count} x {what}" for what, count in sorted(report.faults.items())) or "none"


def _equal(report: Report) -> str:
    gaps = [found.gap for found in report.differences if found.gap is not None]
    note = f", {len(report.differences)} not: gaps up to {max(gaps, default=0.0):.0e}" if report.differences else ""
    return f"{report.equal_share:.1%}{note}"


def _again(report: Report) -> str:
    figures = []
    if report.recomputed is not None:
        figures.append(f"<= {report.recomputed.worst:.0f} tokens")
    if report.missed_tokens is not None:
        figures.append(f"{report.missed_tokens:.1f} on average")
    return f"{', '.join(figures)} ({report.block_size})" if figures else "-"


def _pause(report: Report) -> str:
    if report.pause is None:
        return "-"
    bound = "" if report.pause_bound_s is None else f" (< {report.pause_bound_s:g} s)"
    return f"{report.pause.median:.2f} s{bound}, at most {report.pause.most:.2f} s"


def _health(report: Report) -> str:
    if report.health is None:
        return "-"
    if not report.health.num_told:
        return "never"
    return f"within {report.health.slowest_s:.2f} s, {report.health.num_told} times"


def _result(passed: bool) -> str:
    return "pass" if passed else "FAIL"
