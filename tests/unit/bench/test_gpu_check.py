"""The GPU check loses nothing to a section that goes wrong, and never passes a dry run off as a device's result."""

import json
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from bench.gpu_check import __main__ as gpu_check
from bench.gpu_check import bandwidth, serving, sharing, sharing_vmm
from bench.gpu_check.report import Report
from bench.gpu_check.scratch import remove_leftovers, scratch_folder
from bench.gpu_check.supervise import Section, SectionRun, run_side_by_side
from bench.gpu_check.task import NEEDS_DEVICE, Check, NotRunError, Setting, at_least, at_most
from bench.gpu_check.wheels import unpack

MODULE = "tests.unit.bench.gpu_check_section"
NOTHING = [Section("nothing", "tests.unit.bench.gpu_check_empty_section", 30)]


def run(section: Section, folder: Path, end_s: float = 60.0) -> list[Check]:
    with (folder / "log").open("wb") as log:
        flags = ["--seed", "1", "--dry-run", "--facts", '{"speed": 2.0}']
        return list(SectionRun(section, time.monotonic() + end_s, flags, log).checks())


def test_every_task_is_accounted_for_whatever_becomes_of_its_process(tmp_path: Path) -> None:
    checks = run(Section("odd", MODULE, 60), tmp_path)
    assert [(check.name, check.result, check.reason) for check in checks] == [
        ("a fact", "recorded", ""),
        ("device only", "not run", NEEDS_DEVICE),
        ("before it raised", "recorded", ""),
        ("raises", "fail", "ValueError: no such thing"),
        ("is killed", "fail", "the process died of SIGKILL"),
        ("before it hung", "recorded", ""),
        ("hangs", "fail", "it did not end in time"),
        ("cannot", "not run", "not here"),
        ("a fact", "recorded", ""),
    ]
    assert checks[0].figure == "['speed']"


def test_shares_of_a_section_run_side_by_side_and_make_every_check_once(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        flags = ["--seed", "1", "--dry-run", "--facts", "{}"]
        section, end = Section("odd", MODULE, 60), time.monotonic() + 60
        runs = [SectionRun(section, end, [*flags, "--share", str(i), "3"], log) for i in range(3)]
        names = sorted(check.name for check in run_side_by_side(runs))
    assert names == sorted(check.name for check in run(section, tmp_path))


def test_tasks_for_which_no_time_is_left_are_named(tmp_path: Path) -> None:
    checks = run(Section("odd", MODULE, 60), tmp_path, end_s=0.0)
    assert [(check.name, check.result) for check in checks] == [("odd", "not run")]


def test_the_limits_of_all_sections_fit_into_the_budget_and_the_promised_figures_come_early() -> None:
    names = [section.name for section in gpu_check.SECTIONS]
    assert names == ["facts", "kernels", "bandwidth", "serve", "ipc", "exchange", "vmm", "extras"]
    assert sum(section.limit_s for section in gpu_check.SECTIONS) <= gpu_check.BUDGET_S - gpu_check.END_S
    setting = Setting(dry_run=False, seed=1, end=0.0)
    tasks = [task.name for task in bandwidth.tasks(setting)]
    assert tasks[:4] == ["decode, batch 64 x 8k", "paged and contiguous", "prefill of 2048", "prefill of 8192"]
    assert len(tasks) == 3 + 4 * 3
    assert serving.tasks(setting)[0].name == "llama-8b"
    assert [task.name.split(":")[0] for task in sharing.tasks(setting) + sharing_vmm.tasks(setting)] == [
        *["cuda_ipc"] * 4,
        *["cuda_vmm"] * 4,
    ]


def test_a_section_has_what_those_before_it_left_over_and_never_what_those_after_it_need() -> None:
    first, second, third = (Section(name, MODULE, limit_s) for name, limit_s in (("a", 20), ("b", 50), ("c", 30)))
    assert gpu_check.end_of(first, [second, third], now=0.0, end=100.0) == 20.0
    assert gpu_check.end_of(second, [third], now=5.0, end=100.0) == 70.0
    assert gpu_check.end_of(third, [], now=70.0, end=100.0) == 100.0
    assert gpu_check.end_of(second, [], now=0.0, end=100.0) == 100.0
    assert gpu_check.end_of(second, [third], now=0.0, end=60.0) == 50.0


def test_a_section_that_cannot_be_imported_is_a_failure(tmp_path: Path) -> None:
    (check,) = run(Section("gone", "bench.no_such_module", 60), tmp_path)
    assert check.result == "fail"
    assert "code 1" in check.reason


def test_the_report_is_whole_after_every_check_and_says_what_kind_of_run_it_was(tmp_path: Path) -> None:
    for dry_run in (True, False):
        report = Report(tmp_path, dry_run, seed=7, started="today")
        report.add("facts", Check("speed", "recorded", "2 m/s", 2.0))
        report.add("facts", Check("left out", "not run", reason=NEEDS_DEVICE))
        read: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
        assert read["kind"].startswith("dry run") is dry_run
        assert read["complete"] is dry_run
        assert [check["name"] for check in read["sections"]["facts"]["checks"]] == ["speed", "left out"]
        report.finish()
        assert ("dry run" in (tmp_path / "report.txt").read_text()) is dry_run
        assert report.facts("facts") == {"speed": 2.0}


def test_only_what_needs_a_device_may_be_left_out_of_a_dry_run(tmp_path: Path) -> None:
    report = Report(tmp_path, dry_run=True, seed=7, started="today")
    report.add("facts", Check("slow", "not run", reason="no time was left"))
    assert not report.complete


def test_a_result_that_is_no_number_never_passes() -> None:
    assert at_most("error", float("nan"), 1.0).result == "fail"
    assert at_least("rate", float("nan"), 1.0).result == "fail"
    assert at_most("error", float("nan"), 1.0).value is None


def test_without_a_device_the_dry_run_is_done_and_the_exit_code_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "_missing_device", lambda: "there is no NVIDIA driver")
    assert gpu_check.main(["--out", str(tmp_path)], sections=NOTHING) == 2
    said = capfd.readouterr()
    assert "gpu-check: no CUDA device: there is no NVIDIA driver; this is a dry run" in said.err
    assert "GPU check: dry run, no device" in said.out
    assert gpu_check.main(["--out", str(tmp_path), "--dry-run"], sections=NOTHING) == 0


def test_a_failed_check_fails_the_run(tmp_path: Path) -> None:
    flags = ["--out", str(tmp_path), "--dry-run"]
    assert gpu_check.main(flags, sections=[Section("gone", "bench.no_such_module", 60)]) == 1


def test_a_run_of_some_sections_is_not_complete_and_names_the_others(tmp_path: Path) -> None:
    sections = [*NOTHING, Section("other", "bench.no_such_module", 60)]
    assert gpu_check.main(["--out", str(tmp_path), "--dry-run", "--only", "nothing"], sections=sections) == 1
    report = json.loads((tmp_path / "report.json").read_text())
    assert not report["complete"]
    assert report["sections"]["other"]["checks"][0]["result"] == "not run"


def test_wheels_make_packages_importable(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "brought-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("brought/__init__.py", "")
    assert unpack(tmp_path, tmp_path / "packages") == ["brought-1-py3-none-any.whl"]
    assert (tmp_path / "packages" / "brought" / "__init__.py").is_file()
    with pytest.raises(FileNotFoundError):
        unpack(tmp_path / "nowhere", tmp_path)


def test_what_a_killed_section_leaves_behind_is_removed() -> None:
    with scratch_folder(seed=987654321987, num_bytes=1) as mine, scratch_folder(seed=1, num_bytes=1) as other:
        remove_leftovers(987654321987)
        assert not mine.exists()
        assert other.exists()
    with pytest.raises(NotRunError, match="room for"), scratch_folder(seed=1, num_bytes=1 << 60):
        pass
