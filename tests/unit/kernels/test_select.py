"""Choosing a backend: the one that was asked for, or an error that says what to do."""

import contextlib
import importlib.util
import os
import subprocess
import sys
import typing

import pytest
import torch

from kernels.interface import Kernels
from kernels.select import resolve_kernels, select_kernels
from model_runner.config import RunnerSettings

OPERATIONS = {name for name in vars(Kernels) if not name.startswith("_")}
CHOICES = set(typing.get_args(RunnerSettings.model_fields["kernels"].annotation)) - {"auto"}


def run(program: str, **environment: str) -> str:
    """What a process of its own prints: only one way of running Triton kernels fits into a process."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", f"from kernels.select import select_kernels\n{program}"]
    result = subprocess.run(command, env=inherited | environment, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_a_backend_has_every_operation(name: str) -> None:
    assert set(dir(select_kernels(name))) >= OPERATIONS


def test_auto_follows_the_device() -> None:
    assert resolve_kernels("auto", "cpu") == "cpu"
    assert resolve_kernels("auto", "cuda") == "triton"


def test_every_name_that_the_runner_takes_fits_a_device() -> None:
    def fits(name: str, device: str) -> bool:
        with contextlib.suppress(ValueError):
            return resolve_kernels(name, device) == name
        return False

    assert all(fits(name, "cpu") or fits(name, "cuda") for name in CHOICES)


@pytest.mark.parametrize(
    ("name", "device", "fitting"),
    [("triton", "cpu", "reference, cpu, triton-interpret"), ("cpu", "cuda", "reference, triton")],
)
def test_a_backend_for_another_device_is_refused_with_those_that_fit(name: str, device: str, fitting: str) -> None:
    with pytest.raises(ValueError, match=f"{name!r} do not run on device {device!r}; choose one of {fitting}$"):
        resolve_kernels(name, device)


def test_unknown_kernels_are_an_error_that_names_the_choices() -> None:
    with pytest.raises(ValueError, match=r"'metal'.*reference, cpu, triton, triton-interpret"):
        select_kernels("metal")


@pytest.mark.parametrize("name", ["triton", "triton-interpret"])
def test_without_the_package_triton_kernels_say_how_to_install_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"pip install 'pagekeeper\[triton\]'"):
        select_kernels(name)


def test_without_a_device_triton_kernels_are_an_error_and_no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="'triton' need a CUDA device"):
        select_kernels("triton")


def test_interpreted_kernels_run_on_the_cpu() -> None:
    program = "import torch\nprint(select_kernels('triton-interpret').silu_mul(torch.ones(1, 2)).item())"
    assert float(run(program)) == pytest.approx(1 / (1 + 2.718281828**-1))


def test_interpreted_kernels_are_refused_once_triton_compiles() -> None:
    program = """
import triton
try:
    select_kernels("triton-interpret")
except ValueError as error:
    print(error)
"""
    assert "triton was imported without TRITON_INTERPRET=1; start another process" in run(program)


def test_compiled_kernels_are_refused_once_triton_interprets() -> None:
    program = """
import torch
torch.cuda.is_available = lambda: True
try:
    select_kernels("triton")
except ValueError as error:
    print(error)
"""
    assert "triton was imported with TRITON_INTERPRET=1; start another process" in run(program, TRITON_INTERPRET="1")
