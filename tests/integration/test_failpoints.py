"""A process that dies where dying is hardest costs no token: another one is started, and the streams go on."""

import random
import signal
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from pagekeeper.common import failpoints
from tests.fakes.manager import ManagerProcess
from tests.fakes.resubmitting_gateway import ResubmittingGateway, Stream
from tests.fakes.runner_process import RunnerSpawner, until

POOL = ("--pool-size", "4MiB")
BLOCK_SIZE = 16
RUNNER_POINTS = [name for name in failpoints.NAMES if name.startswith("runner.")]
MANAGER_POINTS = [name for name in failpoints.NAMES if name.startswith("manager.")]
# By default the first pass is the last one.
LAST_PASS = {"runner.before_seal": 4, "runner.after_seal": 4, "runner.after_emit": 30, "manager.before_apply": 12}
PROMPT = random.Random(0).choices(range(3, 384), k=90)

Answers = list[dict[int, list[int]]]


def begin(gateway: ResubmittingGateway) -> list[Stream]:
    """Requests that seal, fork with a copy on write, and end while others go on."""
    return [
        gateway.submit(PROMPT[:20], 90),
        gateway.submit(PROMPT[:50], 60, num_candidates=2, temperature=1.0),
        gateway.submit(PROMPT[10:45], 8),
        gateway.submit(PROMPT, 90),
    ]


@pytest.fixture(scope="module")
def expected(spawner: RunnerSpawner) -> Answers:
    """What they answer where nothing dies."""
    with (
        tempfile.TemporaryDirectory(prefix="pk-") as folder,
        ManagerProcess(Path(folder), *POOL),
        spawner.started(Path(folder)) as runner,
        ResubmittingGateway(runner.socket) as gateway,
    ):
        return gateway.wait(begin(gateway))


def point(name: str) -> str:
    return f"{name}=kill@{LAST_PASS.get(name, 1)}"


def check_nothing_is_left(manager: ManagerProcess) -> None:
    until(lambda: manager.stats().pool.free_blocks == manager.stats().pool.total_blocks - 1)
    assert list(manager.audit().violations) == []


@pytest.mark.parametrize("name", RUNNER_POINTS)
def test_a_runner_that_dies_anywhere_costs_no_token(
    spawner: RunnerSpawner, expected: Answers, runtime_dir: Path, name: str
) -> None:
    with (
        ManagerProcess(runtime_dir, *POOL) as manager,
        spawner.started(runtime_dir, failpoints=point(name)) as first,
        ResubmittingGateway(first.socket) as gateway,
    ):
        streams = begin(gateway)
        if name == "runner.mid_reattach":
            until(lambda: streams[0].num_tokens > 5)
            first.signal(signal.SIGUSR1)
        assert first.wait() == -signal.SIGKILL
        with spawner.started(runtime_dir):
            assert gateway.wait(streams) == expected
            check_nothing_is_left(manager)
    assert max(tokens for stream in streams for tokens in stream.recomputed) <= BLOCK_SIZE


@pytest.mark.parametrize("name", MANAGER_POINTS)
def test_a_manager_that_dies_anywhere_costs_no_token(
    spawner: RunnerSpawner, expected: Answers, runtime_dir: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        monkeypatch.setenv(failpoints.VARIABLE, point(name))
        first = stack.enter_context(ManagerProcess(runtime_dir, *POOL))
        monkeypatch.delenv(failpoints.VARIABLE)
        runner = stack.enter_context(spawner.started(runtime_dir))
        gateway = stack.enter_context(ResubmittingGateway(runner.socket))
        streams = begin(gateway)
        if name == "manager.mid_release":
            until(lambda: streams[0].num_tokens > 5)
            runner.kill()
        assert first.process.wait() == -signal.SIGKILL
        second = stack.enter_context(ManagerProcess(runtime_dir, *POOL))
        if name == "manager.mid_release":
            stack.enter_context(spawner.started(runtime_dir))
        assert gateway.wait(streams) == expected
        check_nothing_is_left(second)
