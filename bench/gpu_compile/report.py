"""What `make gpu-compile` says: a line for each build while it runs, and the table in docs/gpu.md."""

from collections.abc import Iterable
from pathlib import Path

from bench.gpu_compile.build import Build

BEGIN, END = "<!-- gpu-compile begin -->", "<!-- gpu-compile end -->"


def line(build: Build) -> str:
    """One build on one line, its failures below."""
    parts = [f"sm_{build.capability:<3}", f"{build.seconds:5.1f} s"]
    if figures := build.figures:
        loads = " ".join(f"{count}x{width}" for width, count in sorted(figures.loads.items(), reverse=True))
        parts += [
            f"{figures.registers:3} registers",
            f"{figures.shared / 1024:6.1f} KiB shared",
            f"{figures.ctas:2} CTAs ({figures.limited_by})",
            f"loads {loads or 'none'}",
            *(f"{count} {kind}" for kind, count in figures.matrix.items()),
        ]
    failures = [f"\n    FAILS: {failure}" for failure in build.failures]
    return f"{build.name}\n    " + "  ".join(parts) + "".join(failures)


def verdict(build: Build) -> str:
    """A failed build in short: of a compiler's long message the last line, which says what is wrong."""
    reasons = "; ".join(failure.splitlines()[-1] for failure in build.failures)
    return f"{build.name} sm_{build.capability}: {reasons}"


def markdown(builds: Iterable[Build], triton_version: str) -> str:
    """A row for each configuration, a column for each capability."""
    rows: dict[str, dict[int, Build]] = {}
    for build in builds:
        rows.setdefault(build.name, {})[build.capability] = build
    capabilities = sorted({capability for row in rows.values() for capability in row})
    header = ["configuration", *(f"sm_{capability}" for capability in capabilities)]
    lines = [
        f"{len(rows)} configurations, compiled by triton {triton_version} with "
        "`python -m bench.gpu_compile --write docs/gpu.md`.",
        "A cell gives registers a thread / KiB of shared memory / CTAs that fit on a multiprocessor, and the matrix",
        "instruction in use. No configuration uses stack or local memory.",
        "",
        _row(header),
        _row(["---"] * len(header)),
        *(_row([name, *(_cell(row.get(capability)) for capability in capabilities)]) for name, row in rows.items()),
    ]
    return "\n".join(lines)


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(build: Build | None) -> str:
    if build is None or build.figures is None:
        return "-"
    figures = build.figures
    return " ".join([f"{figures.registers} / {figures.shared / 1024:.1f} / {figures.ctas}", *sorted(figures.matrix)])


def replace_table(path: Path, table: str) -> None:
    """Put `table` between the two markers of the file at `path`; the rest of the file keeps every byte.

    Raises:
        ValueError: the file has not exactly one begin marker, and one end marker after it.
    """
    text = path.read_text(encoding="utf-8")
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in head + tail:
        raise ValueError(f"{path} must have {BEGIN} and, after it, {END}, once each")
    path.write_text(f"{head}{BEGIN}\n{table}\n{END}{tail}", encoding="utf-8")
