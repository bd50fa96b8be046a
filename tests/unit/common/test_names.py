"""A name that nobody reads is told, and what it was probably meant to be."""

import json
import os
import subprocess
import sys

import pytest

from cache_manager.config import ManagerSettings
from gateway.config import GatewaySettings
from model_runner.config import RunnerSettings
from pagekeeper.cli.up import UpSettings
from pagekeeper.common.errors import ConfigurationError
from pagekeeper.common.names import SETTINGS, unknown_variables
from pagekeeper.common.settings import load_settings


def test_the_names_are_those_of_all_processes_together() -> None:
    processes = (UpSettings, ManagerSettings, RunnerSettings, GatewaySettings)
    assert set().union(*(settings.model_fields for settings in processes)) == SETTINGS


def test_variables_of_other_processes_and_of_the_tools_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POOL_SIZE", "MAX_QUEUE", "THREADS", "HOME", "CONFIG_FILE", "FAILPOINTS"):
        monkeypatch.setenv(f"PAGEKEEPER_{name}", "x")
    assert unknown_variables() == {}


def test_a_misspelt_variable_is_a_warning_in_the_log() -> None:
    program = "from pagekeeper.common.logging import configure_logging; configure_logging('test')"
    environment = os.environ | {"PAGEKEEPER_POOLSIZE": "1GiB"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    warning = json.loads(done.stderr)
    assert warning["level"] == "warning"
    assert warning["event"] == "PAGEKEEPER_POOLSIZE is no setting; did you mean PAGEKEEPER_POOL_SIZE?"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--max-queu", "3"], "--max-queu is no flag; did you mean --max-queue?"),
        (["--max-queu=3"], "--max-queu is no flag; did you mean --max-queue?"),
        (["--zzz"], "--zzz is no flag"),
        (["--max-queue"], "--max-queue"),
        (["left over"], "left over"),
    ],
)
def test_a_wrong_flag_is_one_line(args: list[str], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as error:
        load_settings(GatewaySettings, ["--model", "/models/tiny", *args])
    assert "\n" not in str(error.value)
