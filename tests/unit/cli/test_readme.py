"""The README names every setting, and only settings that exist."""

import re
from pathlib import Path

from cache_manager.config import ManagerSettings
from gateway.config import GatewaySettings
from model_runner.config import RunnerSettings
from pagekeeper.cli.up import UpSettings
from pagekeeper.common.settings import Settings

README = Path(__file__).parents[3] / "README.md"
PROCESSES: dict[str, type[Settings]] = {
    "up": UpSettings,
    "cache manager": ManagerSettings,
    "runner": RunnerSettings,
    "gateway": GatewaySettings,
}


def test_the_table_of_settings_is_complete() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([\w, ]+) \|$", README.read_text(), flags=re.MULTILINE)
    in_table = {name: set(PROCESSES) if where == "all" else set(where.split(", ")) for name, where in rows}
    in_code: dict[str, set[str]] = {}
    for process, settings in PROCESSES.items():
        for name in settings.model_fields:
            in_code.setdefault(name, set()).add(process)
    assert in_table == in_code


def test_every_setting_says_what_it_is() -> None:
    undescribed = [
        f"{process}: {name}"
        for process, settings in PROCESSES.items()
        for name, field in settings.model_fields.items()
        if not field.description
    ]
    assert not undescribed
