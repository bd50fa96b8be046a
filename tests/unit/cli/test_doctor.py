"""What the doctor says of machines that the tests do not run on, and of this one."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pagekeeper.cli import machine
from pagekeeper.cli.diagnosis import Finding, examine
from pagekeeper.cli.doctor import doctor
from pagekeeper.cli.machine import Machine, Packages, look_around
from pagekeeper.common.cuda_probe import CudaDevice
from pagekeeper.common.errors import ConfigurationError
from tests.unit.cli.machines import CPU_MACHINE, CPU_PACKAGES, CUDA_PACKAGES, GPU_MACHINE, H200


def find(which: Machine, what: str) -> Finding:
    diagnosis = examine(which)
    (finding,) = (each for each in (*diagnosis.findings, *diagnosis.conclusions) if each.what == what)
    return finding


def test_a_machine_without_a_gpu_serves_on_the_cpu_and_hears_what_is_missing() -> None:
    assert find(CPU_MACHINE, "serve on the CPU").can
    assert find(CPU_MACHINE, "serve on a GPU") == Finding(
        "serve on a GPU", False, "NVIDIA driver: there is no NVIDIA driver"
    )
    assert find(CPU_MACHINE, "NVIDIA driver").remedy == "install one"
    assert find(CPU_MACHINE, "triton") == Finding(
        "triton", False, "not installed", "only the GPU needs it: pip install --editable '.[triton]'"
    )
    assert find(CPU_MACHINE, "torch").found == "2.13.0+cpu, built for the CPU"
    assert find(CPU_MACHINE, "processor").found == "2 cores, avx2 fma, 24.0 GiB of memory, 20.0 GiB of it available"


def test_a_machine_with_everything_serves_on_both() -> None:
    diagnosis = examine(GPU_MACHINE)
    assert all(finding.can and not finding.remedy for finding in (*diagnosis.findings, *diagnosis.conclusions))
    assert find(GPU_MACHINE, "NVIDIA driver").found == "CUDA 13.0; 0: NVIDIA H200 (140.0 GiB, compute capability 9.0)"


def test_a_gpu_without_its_packages_does_not_serve() -> None:
    bare = replace(GPU_MACHINE, packages=CPU_PACKAGES)
    assert find(bare, "NVIDIA driver").can
    assert "CUDA packages: missing: torch built for CUDA" in find(bare, "serve on a GPU").found


def test_a_device_that_is_too_old_is_marked_among_the_others() -> None:
    old = CudaDevice(1, "Tesla T4", "uuid", (7, 5), 16 << 30)
    mixed = replace(GPU_MACHINE, cuda=replace(H200, devices=(*H200.devices, old)))
    assert "1: Tesla T4 (16.0 GiB, compute capability 7.5, too old)" in find(mixed, "NVIDIA driver").found


@pytest.mark.parametrize(("package", "version", "needed"), [("torch", "2.9.1", "2.11"), ("triton", "3.5.0", "3.6")])
def test_a_package_that_is_too_old_is_named_with_what_is_needed(package: str, version: str, needed: str) -> None:
    packages = replace(CUDA_PACKAGES, versions={**CUDA_PACKAGES.versions, package: version})
    outdated = replace(GPU_MACHINE, packages=packages)
    finding = find(outdated, package)
    assert (finding.can, finding.remedy) == (False, f"{needed} or newer is needed")
    assert find(outdated, "serve on a GPU").found.startswith(f"{package}: {version}")


def test_a_machine_that_can_serve_nowhere_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "look_around", lambda: replace(CPU_MACHINE, packages=Packages({}, None, None)))
    with pytest.raises(SystemExit) as ended:
        run_doctor()
    assert ended.value.code == 1
    assert "cannot  serve on the CPU  torch: not installed" in capsys.readouterr().out


def test_another_system_than_linux_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigurationError, match="needs Linux"):
        look_around()


def test_this_machine_is_found_without_importing_torch() -> None:
    program = (
        "import sys; from pagekeeper.cli.machine import look_around; found = look_around(); "
        "print(found.num_cores > 0, found.available_memory > 0, 'torch' in found.packages.versions, "
        "[m for m in ('torch', 'triton', 'cupy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "True True True []\n"


@pytest.mark.parametrize(
    ("line", "version"),
    [("cuda: Optional[str] = '13.0'", "13.0"), ("cuda: Optional[str] = None", None), ("cuda = '12.8'", "12.8")],
)
def test_the_cuda_of_a_torch_build_is_read_from_its_file(
    line: str, version: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('read, not imported')\n")
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.11.0'\n{line}\nhip: Optional[str] = None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert machine.find_packages().torch_cuda == version


def test_the_c_compiler_is_the_one_that_triton_would_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert machine.find_packages().c_compiler is None
    (tmp_path / "clang").touch(mode=0o755)
    assert machine.find_packages().c_compiler == str(tmp_path / "clang")
    monkeypatch.setenv("CC", "mine")
    assert machine.find_packages().c_compiler == "mine"


def test_json_holds_every_line_and_nothing_else_is_printed() -> None:
    command = [sys.executable, "-m", "pagekeeper", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    diagnosis = json.loads(done.stdout)
    assert [set(finding) for finding in (*diagnosis["findings"], *diagnosis["conclusions"])] == 8 * [
        {"what", "can", "found", "remedy"}
    ]


def run_doctor() -> None:
    """As the command line runs it."""
    import typer

    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(doctor)
    app([])
