"""Gateways, runners, cache manager and clients, through many short histories with everything that can go wrong."""

import os
import subprocess
import sys
from collections import Counter

import pytest

from tests.simulation.model import mix
from tests.simulation.run import run
from tests.simulation.world import Violation, World

NUM_SEEDS = 250


def test_nothing_is_lost_doubled_or_left_behind_whatever_fails() -> None:
    faults, num_bounded = Counter[str](), 0
    for seed in range(1, NUM_SEEDS + 1):
        report = run(seed)
        assert report.violation is None, str(report)
        faults += report.faults
        num_bounded += report.num_bounded
    assert faults.keys() == {"kill", "stop", "break", "drain", "retire", "replace", "disconnect", "leave"}
    assert num_bounded > 50


def test_a_seed_is_a_whole_history() -> None:
    lines: list[list[str]] = [[], []]
    reports = [run(7, each.append) for each in lines]
    assert reports[0] == reports[1]
    assert lines[0] == lines[1]
    assert len(lines[0]) > 50
    assert run(8).checksum != reports[0].checksum


def test_no_order_hangs_on_the_hashes_of_a_process() -> None:
    command = [sys.executable, "-m", "tests.simulation", "--seeds", "40"]
    printed = [
        subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True)
        for seed in ("1", "2")
    ]
    checksums = [each.stdout.split()[-1] for each in printed]
    assert checksums[0] == checksums[1]


def test_policies_are_simulated_without_torch_and_without_grpc() -> None:
    code = "import sys, tests.simulation.run; sys.exit(not {'torch', 'grpc'}.isdisjoint(sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_violation_is_told_with_what_went_before_and_how_to_see_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(world: World, until: float, done: object) -> bool:
        del until, done
        world.note("someone", "does something")
        raise Violation("it went wrong")

    monkeypatch.setattr(World, "run", fail)
    report = run(3)
    assert report.violation == "Violation: it went wrong"
    assert "someone      does something" in str(report)
    assert str(report).endswith("replay: python -m tests.simulation --first 3 --seeds 1 --trace")


def test_equal_kv_means_equal_tokens_before_it() -> None:
    values = {mix(mix(value, first), second) for value in range(20) for first in range(20) for second in range(20)}
    assert len(values) == 8000
