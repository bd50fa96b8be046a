"""Flags over environment over file; what is wrong with any of them is one line."""

from pathlib import Path

import pytest

from gateway.config import GatewaySettings
from pagekeeper.common.errors import ConfigurationError
from pagekeeper.common.settings import load_settings


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "pagekeeper.toml"
    monkeypatch.setenv("PAGEKEEPER_CONFIG_FILE", str(path))
    return path


def test_flags_win_over_the_environment_and_that_over_the_file(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text('model = "/models/tiny"\nmax_queue = 1\nmax_concurrent = 1\ngrace_s = 1\n')
    monkeypatch.setenv("PAGEKEEPER_MAX_CONCURRENT", "2")
    monkeypatch.setenv("PAGEKEEPER_GRACE_S", "2")
    settings = load_settings(GatewaySettings, ["--grace-s", "3"])
    assert (settings.max_queue, settings.max_concurrent, settings.grace_s) == (1, 2, 3)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "there is no file"),
        ("pool_size = 64MiB", "line 1"),
        ('max_queue = "x"', "max_queue"),
        ("max_queu = 1", r"max_queu is no setting; did you mean max_queue\?"),
        ("pool-size = 1", r"pool-size is no setting; did you mean pool_size\?"),
        ("[gateway]\nmax_queue = 1", "gateway is no setting"),
    ],
)
def test_a_wrong_file_is_named_on_one_line(config: Path, content: str | None, words: str) -> None:
    if content is not None:
        config.write_text(content)
    with pytest.raises(ConfigurationError, match=words) as error:
        load_settings(GatewaySettings, ["--model", "/models/tiny"])
    assert "\n" not in str(error.value)


def test_a_file_may_hold_the_settings_of_other_processes(config: Path) -> None:
    config.write_text('max_queue = 1\npool_size = "64MiB"\nthreads = 1\n')
    assert load_settings(GatewaySettings, ["--model", "/models/tiny"]).max_queue == 1
