"""Whatever is not as promised is a complaint, and a complaint is a failed row."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.chaos.figures import HealthFigures, Recomputed
from bench.chaos.processes import Footprint
from bench.chaos.report import Pause, Report, pause_of
from bench.chaos.scoreboard import COLUMNS, markdown, read_json, row_of, row_of_outcome, write_json
from bench.chaos.streams import Difference
from bench.promise import Outcome

GOOD = Report(
    "runner killed",
    "1/runner killed",
    16,
    standby=True,
    faults={"kill runner": 200},
    num_whole=200,
    differences=[Difference(0, 5, gap=1e-5)],
    pause=Pause(900, 0.5, 0.9),
    pause_bound_s=0.8,
    recomputed=Recomputed(15.0, 0),
    missed_tokens=8.0,
    block_size=16,
    health=HealthFigures(0, 0.0, 0.0, 0),
    growth={"gateway": Footprint(1, 0, 1 << 20)},
)


def test_a_report_in_which_all_is_well_passes() -> None:
    row = row_of(GOOD)
    assert row.complaints == []
    assert row.cells[-1] == "pass"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"broken": "NoRecoveryError: not within 60 s"}, "NoRecoveryError"),
        ({"num_whole": 0, "differences": []}, "no stream"),
        ({"errors": ["UnavailableError: gone"]}, "1 streams lost, such as: UnavailableError"),
        ({"lost_tokens": 1}, "1 tokens lost"),
        ({"doubled_tokens": 1}, "1 doubled"),
        ({"differences": [Difference(0, 5, gap=1e-5)] * 3}, "only 98.5%"),
        ({"differences": [Difference(0, 5, gap=0.1)]}, "choice was clear"),
        ({"differences": [Difference(0, 5)]}, "choice was clear"),
        ({"pause": Pause(900, 0.81, 0.9)}, "not below 0.8 s"),
        ({"pause": None}, "not below 0.8 s"),
        ({"recomputed": Recomputed(17.0, 1)}, "1 streams computed more"),
        ({"missed_tokens": 17.0}, "missed 17.0 tokens"),
        ({"health": HealthFigures(0, 0.0, 0.0, 2)}, "too late"),
        ({"health": HealthFigures(1, 0.1, 4.0, 0, num_needless=1)}, "stopped serving after 1 faults"),
        ({"num_bystanders": 1}, "1 other processes"),
        ({"left": ["3 leased left"]}, "3 leased left"),
        ({"growth": {"gateway": Footprint(9, 0, 0)}}, "gateway grew"),
        ({"growth": {"gateway": Footprint(0, 20, 0)}}, "gateway grew"),
        ({"growth": {"gateway": Footprint(0, 0, 1 << 30)}}, "gateway grew"),
    ],
)
def test_whatever_is_wrong_is_said(change: dict[str, Any], words: str) -> None:
    row = row_of(replace(GOOD, **change))
    assert len(row.complaints) == 1
    assert words in row.complaints[0]
    assert row.cells[-1] == "FAIL"


def test_a_pause_is_the_median_of_its_samples() -> None:
    assert pause_of([3.0, 1.0, 2.0]) == Pause(3, 2.0, 3.0)
    assert pause_of([]) is None


def test_a_scoreboard_reads_back_as_it_was_written(tmp_path: Path) -> None:
    rows = [row_of(GOOD), row_of_outcome("simulator", Outcome("2 violations", "none", False))]
    write_json(tmp_path / "chaos.json", 1, [GOOD], rows)
    assert read_json(tmp_path / "chaos.json") == rows
    lines = markdown(rows).splitlines()
    assert len(lines) == 4
    assert {line.count("|") for line in lines} == {len(COLUMNS) + 1}
