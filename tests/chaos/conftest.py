"""What the campaigns of these tests run on: a tiny random model, a few prompts, four streams at a time."""

from pathlib import Path

import pytest

from bench.chaos.campaign import Setting
from bench.chaos.workload import prompts
from bench.reference import Reference

NUM_SLOTS = 4


@pytest.fixture(scope="session")
def setting(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return Setting(
        model=tiny_model,
        reference=Reference(tiny_model),
        prompts=prompts(tiny_model, fewest=150, most=300)[:8],
        pool_size="16MiB",
        environment={"PAGEKEEPER_THREADS": "1"},
        folder=tmp_path_factory.mktemp("chaos"),
    )
