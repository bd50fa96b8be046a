"""`make chaos`: what is promised of dying processes, with the counts that it is promised for, as one scoreboard.

Without --full, one campaign of one's own: `python -m bench.chaos --process runner --signal kill --kills 20 --standby`.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console

from bench.chaos import failpoints, roles, suite
from bench.chaos.campaign import Campaign, Setting, run
from bench.chaos.faults import PROCESSES, Plan, Signal
from bench.chaos.report import Report
from bench.chaos.scoreboard import Row, markdown, read_json, row_of, row_of_outcome, table, write_json
from bench.chaos.workload import prompts
from bench.promise import Outcome, Workbench
from bench.promises.leaks import no_growth
from bench.promises.simulation import nothing_is_violated
from pagekeeper.cli.demo_model import demo_model_path

_POOL_SIZE = "512MiB"
_NUM_SLOTS = 16
_PROGRESS_S = 30.0

Measure = Callable[[], Report | Outcome]


def main() -> None:
    """Run, print the scoreboard; exit 1 unless everything is as promised."""
    options = _parse()
    console = Console(width=None if sys.stdout.isatty() else 200)
    rows = options.read or _run(options)
    if options.markdown:
        print(markdown(rows))
    else:
        console.print(table(rows))
    for row in rows:
        for complaint in row.complaints:
            console.print(f"{row.cells[0]}: {complaint}", highlight=False, markup=False)
    sys.exit(any(row.complaints for row in rows))


def _run(options: argparse.Namespace) -> list[Row]:
    with Workbench(options.model) as bench:
        logs = options.logs or bench.folder
        logs.mkdir(parents=True, exist_ok=True)
        board = Board(options, Console(stderr=True))
        setting = Setting(bench.model, bench.reference, prompts(bench.model), _POOL_SIZE, {}, logs)
        campaigns = suite.full(options.share) if options.full else [_campaign(options)]
        measures: dict[str, Measure] = {
            campaign.name: partial(run, campaign, setting, options.seed, board.tell_progress) for campaign in campaigns
        }
        if options.full:
            measures |= _others(options, setting, bench, board)
        wanted = {name: measure for name, measure in measures.items() if options.only in name}
        if not wanted:
            sys.exit(f"nothing has {options.only!r} in its name; there are: {', '.join(measures)}")
        board.say(f"seed {options.seed}; to be measured: {', '.join(wanted)}")
        for name, measure in wanted.items():
            board.add(name, measure)
    return board.rows


def _others(options: argparse.Namespace, setting: Setting, bench: Workbench, board: "Board") -> dict[str, Measure]:
    """What is measured with --full and is no campaign."""
    kinds = (Signal.KILL, Signal.STOP)
    growth = no_growth(max(10, round(options.share * 200)))
    return {
        "failpoints": partial(failpoints.run, kinds, setting, _NUM_SLOTS, options.seed, board.tell_progress),
        "prefill and decode on two runners": partial(roles.measure, setting),
        growth.name: partial(growth.measure, bench),
        "simulator": partial(nothing_is_violated, bench, round(options.share * suite.NUM_SEEDS)),
    }


class Board:
    """Keeps what each measurement has shown as soon as it has.

    Attributes:
        rows: so far.
    """

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self._options = options
        self._console = console
        self.rows: list[Row] = []
        self._reports: list[Report] = []
        self._told_at = 0.0

    def add(self, name: str, measure: Measure) -> None:
        """Measure; whatever goes wrong is a failed row."""
        began = time.monotonic()
        try:
            outcome = measure()
        except Exception as error:  # noqa: BLE001 - what cannot be run is a failed row, and the others run on
            outcome = Outcome(f"{type(error).__name__}: {error}", "to be run", False)
        if isinstance(outcome, Report):
            self._reports.append(outcome)
            row = row_of(outcome)
        else:
            row = row_of_outcome(name, outcome)
        self.rows.append(row)
        self.say(f"{row.cells[-1]}  {name}  ({time.monotonic() - began:.0f} s)")
        if self._options.json:
            write_json(self._options.json, self._options.seed, self._reports, self.rows)

    def tell_progress(self, text: str) -> None:
        """One line that is written over and over, or now and then a line of its own where that cannot be."""
        if self._console.is_terminal:
            self.say(f"{text:<{self._console.width - 1}}", end="\r")
        elif time.monotonic() - self._told_at > _PROGRESS_S:
            self._told_at = time.monotonic()
            self.say(text)

    def say(self, text: str, end: str = "\n") -> None:
        """Tell whoever watches."""
        self._console.print(text, end=end, highlight=False, markup=False)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.chaos", description=__doc__)
    parser.add_argument("--full", action="store_true", help="every campaign, failpoints, roles and the simulator")
    parser.add_argument("--only", default="", metavar="WORDS", help="run only what has WORDS in its name")
    parser.add_argument("--share", type=_share, default=1.0, help="with --full: of the counts, such as 0.1")
    parser.add_argument("--process", choices=PROCESSES, nargs="+", default=["runner"], help="who is hit, in turn")
    parser.add_argument("--signal", type=Signal, choices=list(Signal), nargs="+", default=[Signal.KILL], help="how")
    parser.add_argument("--kills", type=_count, default=10, help="faults that hit live streams")
    parser.add_argument("--streams", type=_count, default=_NUM_SLOTS, help="streams at a time")
    parser.add_argument("--standby", action="store_true", help="with a standby runner")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="of all faults")
    parser.add_argument("--model", type=_existing, default=str(demo_model_path()), help="model directory")
    parser.add_argument("--logs", type=Path, help="directory for the servers' logs, which are kept then")
    parser.add_argument("--json", type=Path, help="file for everything that was found out")
    parser.add_argument("--markdown", action="store_true", help="print the scoreboard as docs/reliability.md has it")
    parser.add_argument(
        "--read", type=_scoreboard, metavar="JSON", help="run nothing; print an earlier run's scoreboard"
    )
    return parser.parse_args()


def _count(text: str) -> int:
    if (count := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return count


def _share(text: str) -> float:
    if not 0 < (share := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return share


def _existing(text: str) -> Path:
    if not (path := Path(text)).exists():
        raise argparse.ArgumentTypeError(f"there is no {text}")
    return path


def _scoreboard(text: str) -> list[Row]:
    try:
        rows = read_json(Path(text))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise argparse.ArgumentTypeError(f"{text} is no scoreboard: {error}") from error
    if not rows:
        raise argparse.ArgumentTypeError(f"{text} has no rows")
    return rows


def _campaign(options: argparse.Namespace) -> Campaign:
    targets = tuple((process, kind) for process in options.process for kind in options.signal)
    name = " and ".join(options.process) + ": " + ", ".join(options.signal)
    return Campaign(
        name, Plan(targets, options.kills), options.streams, options.standby or "standby" in options.process
    )


if __name__ == "__main__":
    main()
