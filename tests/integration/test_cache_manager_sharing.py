"""Several runners on one small pool: all of them get on, whoever came first is served first, and nothing is lost."""

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from cache_manager.sessions import CachePolicy
from model_runner.model.load import LoadedModel
from pagekeeper.cli.server import Server
from pagekeeper.client import AdminClient, Client
from pagekeeper.common.ids import Epoch, SequenceId
from pagekeeper.common.operations import Open, Opened, Release, Result, Shortage, StepMessage
from tests.fakes.engine import BLOCK_SIZE, DEADLINE_S, EngineUnderTest, load_tiny, running_engine
from tests.fakes.local_cache import LocalPool
from tests.fakes.manager import LIMIT_S, wait_until
from tests.models import write_tiny_model
from tests.nothing_left import check_nothing_is_left


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


class WatchedPolicy(CachePolicy):
    """Checks of every Open that succeeds that no older one waits, whichever runner's it is."""

    def __init__(self, pool_bytes: int) -> None:
        super().__init__(pool_bytes)
        self.waiting: list[tuple[Epoch, SequenceId]] = []
        self.served_after_waiting: list[Epoch] = []

    def apply(self, epoch: Epoch, message: StepMessage) -> list[Result]:
        results = super().apply(epoch, message)
        for operation, result in zip(message.operations, results, strict=True):
            key = (epoch, operation.sequence) if isinstance(operation, Open | Release) else None
            match operation, result:
                case Open(), Shortage() if key not in self.waiting:
                    self.waiting.append(key)
                case Open(), Opened():
                    assert not self.waiting or self.waiting[0] == key, "an older Open waits"
                    if self.waiting:
                        self.served_after_waiting.append(epoch)
                        self.waiting.remove(key)
                case Release(), _ if key in self.waiting:
                    self.waiting.remove(key)
        return results

    def detach(self, epoch: Epoch, *, quarantine: bool = False) -> None:
        super().detach(epoch, quarantine=quarantine)
        self.waiting = [key for key in self.waiting if key[0] != epoch]


def shared_pool(model: LoadedModel, num_blocks: int) -> LocalPool:
    layout = model.kv_layout(BLOCK_SIZE)
    pool = LocalPool(num_blocks, layout)
    pool.policy = WatchedPolicy(num_blocks * layout.block_bytes)
    return pool


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 384), k=length)


def settle(pool: LocalPool) -> None:
    """Every block comes back to the pool."""
    deadline = time.monotonic() + DEADLINE_S
    while (stats := pool.policy.stats().pool).free_blocks != stats.total_blocks - 1:
        assert time.monotonic() < deadline, stats
        time.sleep(0.005)
    with pool.lock:
        assert pool.policy.check_integrity() == []


def two_engines(model: LoadedModel, pool: LocalPool, stack: ExitStack) -> list[EngineUnderTest]:
    return [stack.enter_context(running_engine(model, pool=pool)) for _ in range(2)]


@pytest.mark.parametrize("num_blocks", [12, 24])
def test_two_runners_on_a_pool_too_small_for_both_finish_everything(model: LoadedModel, num_blocks: int) -> None:
    prompts = [prompt_of(10 + 3 * i % 17, seed=i) for i in range(10)]
    with running_engine(model) as roomy:
        expected = roomy.wait(*[roomy.submit(prompt, max_tokens=48) for prompt in prompts])
    pool = shared_pool(model, num_blocks)
    with ExitStack() as stack:
        engines = two_engines(model, pool, stack)
        answers = [[engine.submit(prompt, max_tokens=48) for prompt in prompts] for engine in engines]
        for engine, mine in zip(engines, answers, strict=True):
            assert engine.wait(*mine) == expected
        settle(pool)
    assert sum(engine.scheduler.num_preemptions for engine in engines) > 0
    assert pool.policy.waiting == []
    assert set(pool.policy.served_after_waiting) == {1, 2}


def test_case_18_out_of_blocks_never_fails_a_running_request(model: LoadedModel) -> None:
    """Case 18: under overload, every admitted request finishes, with the tokens it would have had alone."""
    rng = random.Random(18)
    wanted = [(prompt_of(rng.randrange(1, 40), seed=i), rng.randrange(1, 70)) for i in range(40)]
    with running_engine(model) as roomy:
        expected = roomy.wait(*[roomy.submit(prompt, max_tokens=count) for prompt, count in wanted])
    pool = shared_pool(model, 17)  # of 40 requests that need up to 14 blocks each
    with ExitStack() as stack:
        engines = two_engines(model, pool, stack)
        answers = [engines[i % 2].submit(prompt, max_tokens=count) for i, (prompt, count) in enumerate(wanted)]
        finished = [engines[i % 2].wait(answer)[0] for i, answer in enumerate(answers)]
        settle(pool)
    assert finished == expected
    assert [len(token_ids) for token_ids in finished] == [count for _, count in wanted]
    assert pool.policy.stats().counters.shortages > 0
    assert sum(engine.scheduler.num_preemptions for engine in engines) > 0


def test_a_stream_of_short_requests_of_one_runner_does_not_starve_a_long_one_of_another(model: LoadedModel) -> None:
    pool = shared_pool(model, 24)
    with ExitStack() as stack:
        busy, other = two_engines(model, pool, stack)
        short = [busy.submit(prompt_of(20, seed=i), max_tokens=30) for i in range(8)]
        while not short[0].token_ids:
            busy.steps.get(timeout=DEADLINE_S)
        long = other.submit(prompt_of(150, seed=99), max_tokens=8)
        deadline = time.monotonic() + DEADLINE_S
        while not long.ended.is_set():
            assert time.monotonic() < deadline, pool.policy.sessions()
            unfinished = [answer for answer in short if not answer.ended.is_set()]
            short += [
                busy.submit(prompt_of(20, seed=len(short) + i), max_tokens=30) for i in range(8 - len(unfinished))
            ]
            busy.steps.get(timeout=DEADLINE_S)
        assert len(long.token_ids) == 8
        busy.wait(*short)
        settle(pool)


def test_a_prefix_that_one_runner_computed_is_found_by_the_other(model: LoadedModel) -> None:
    pool = shared_pool(model, 64)
    prompt = prompt_of(64, seed=5)
    with ExitStack() as stack:
        one, other = two_engines(model, pool, stack)
        first = one.submit(prompt)
        one.wait(first)
        second = other.submit(prompt)
        other.wait(second)
        settle(pool)
    assert second.token_ids == first.token_ids
    assert second.sequence.num_cached_tokens == 63


def test_when_one_runner_ends_in_the_middle_the_other_gets_its_blocks(model: LoadedModel) -> None:
    pool = shared_pool(model, 24)
    with running_engine(model, pool=pool) as survivor:
        with running_engine(model, pool=pool) as leaver:
            left = [leaver.submit(prompt_of(30, seed=i), max_tokens=200) for i in range(4)]
            kept = [survivor.submit(prompt_of(30, seed=i), max_tokens=40) for i in range(4)]
            while not left[0].token_ids:
                leaver.steps.get(timeout=DEADLINE_S)
        assert all(len(tokens) == 40 for tokens in survivor.wait(*kept))
        settle(pool)


@pytest.fixture
def second_runner(runtime_dir: Path, tiny_model: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Start another runner in `runtime_dir`, beside that of the server there."""
    with ExitStack() as runners:

        def start() -> subprocess.Popen[bytes]:
            command = [sys.executable, "-m", "model_runner", "--name", "second", "--threads", "1"]
            command += ["--runtime-dir", str(runtime_dir), "--model", str(tiny_model)]
            process = runners.enter_context(subprocess.Popen(command, stderr=subprocess.DEVNULL))
            runners.callback(process.kill)
            return process

        yield start


def test_two_real_runners_on_one_real_pool_serve_one_gateway(
    start_server: Callable[..., Server],
    second_runner: Callable[[], subprocess.Popen[bytes]],
    runtime_dir: Path,
) -> None:
    server = start_server("--pool-size", "512KiB", "--runtime-dir", str(runtime_dir))
    process = second_runner()
    with AdminClient(server.admin) as admin:
        wait_until(lambda: len(admin.sessions()) == 2)

        def ask(number: int) -> list[int]:
            with Client(server.address) as client:
                prompt = prompt_of(60, seed=number % 8)
                answer = client.generate(prompt, temperature=0.0, max_tokens=100, ignore_eos=True, timeout_s=60)
                return [token_id for delta in answer for token_id in delta.token_ids]

        def both_are_asked() -> bool:
            asked = [threads.submit(ask, number) for number in range(4)]
            found = False
            while not all(answer.done() for answer in asked):
                found |= all(session["sequences"] for session in admin.sessions())
            return found

        # Together they need 160 blocks of 63. Each prompt is asked twice and has one answer, whoever gives it.
        with ThreadPoolExecutor(16) as threads:
            wait_until(both_are_asked)
            answers = list(threads.map(ask, range(16)))
        assert [len(answer) for answer in answers] == [100] * 16
        assert answers[:8] == answers[8:]
        assert admin.stats()["ops"]["shortages"] > 0
        assert min(session["number"] for session in admin.sessions()) > 50
        check_nothing_is_left(server)

        process.terminate()
        assert process.wait(LIMIT_S) == 0
        wait_until(lambda: len(admin.sessions()) == 1)
        assert ask(0) == answers[0]
    check_nothing_is_left(server)
