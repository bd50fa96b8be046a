"""Both Python clients and the command, while real gateway processes are killed and stopped."""

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pagekeeper import CannotConnectError
from pagekeeper.client import aio, connection
from pagekeeper.client.channel import OPTIONS
from pagekeeper.common.sockets import RuntimeDir
from tests.fakes.gateway import until
from tests.fakes.gateway_process import ROOT, started
from tests.fakes.runner import FakeRunner, Script, answer_of
from tests.fakes.speech import SPOKEN, WORDS, spoken
from tests.fakes.tokenizer import write_model_directory
from tests.unit.client.adapters import ADAPTERS, Adapter

PROMPT = [5, 6, 7]
LENGTH = 400
PATIENCE_S = 60.0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model_directory(tmp_path / "tiny")


@pytest.fixture
async def runner(runtime_dir: Path) -> AsyncIterator[FakeRunner]:
    async with FakeRunner(RuntimeDir(runtime_dir).runner_socket("a"), Script(step_s=0.005)) as fake:
        yield fake


class Reading:
    """A client of each kind, each with answers that are being read."""

    def __init__(self, server: str, num_answers: int = 4) -> None:
        self.clients: list[Adapter] = [adapter(server) for adapter in ADAPTERS.values()]
        self.answers: list[Any] = []
        self._tasks = []
        for client in self.clients:
            for seed in range(num_answers):
                answer = client.generate(PROMPT, seed=seed, n=2, max_tokens=LENGTH, timeout_s=PATIENCE_S)
                self.answers.append(answer)
                self._tasks.append(asyncio.create_task(client.collect(answer)))

    def num_tokens(self) -> int:
        """Of the answer that has fewest."""
        return min(answer._tokens_received() for answer in self.answers)

    async def check(self) -> None:
        """Every answer is as if nothing had happened."""
        for answer, candidates in zip(self.answers, await asyncio.gather(*self._tasks), strict=True):
            expected = [answer_of(answer.seed, PROMPT, LENGTH, index) for index in range(2)]
            assert [candidate.token_ids for candidate in candidates] == expected
            assert answer.usage.completion_tokens == 2 * LENGTH
        for client in self.clients:
            await client.close()


async def test_a_gateway_is_killed_again_and_again_and_comes_back(
    runtime_dir: Path, model: Path, runner: FakeRunner
) -> None:
    rng = random.Random(6)
    address = "127.0.0.1:0"
    reading = None
    for _ in range(3):
        async with started(runtime_dir, model, listen=address) as (process, address):
            reading = reading or Reading(address)
            goal = reading.num_tokens() + rng.randrange(1, LENGTH // 4)
            await until(lambda: reading.num_tokens() >= goal)  # noqa: B023 - waited for here
            process.kill()
    async with started(runtime_dir, model, listen=address):
        assert reading is not None
        await reading.check()
    await until(lambda: not runner.live)


async def test_when_one_of_two_gateways_is_killed_its_answers_go_on_at_the_other(
    runtime_dir: Path, model: Path, runner: FakeRunner
) -> None:
    async with (
        started(runtime_dir, model) as (first, first_address),
        started(runtime_dir, model) as (_, second_address),
    ):
        reading = Reading(f"{first_address},{second_address}")
        await until(lambda: reading.num_tokens() > 20)
        first.kill()
        await reading.check()
    await until(lambda: not runner.live)


def ping_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a client does, but with less patience than anybody needs."""
    quick = {"grpc.keepalive_time_ms": 500, "grpc.http2.ping_timeout_ms": 500, "grpc.min_reconnect_backoff_ms": 500}
    for module in (connection, aio):
        monkeypatch.setattr(module, "OPTIONS", [*(dict(OPTIONS) | quick).items()])


async def test_a_stopped_gateway_is_left_for_another_and_mixes_nothing_in_when_it_wakes_up(
    runtime_dir: Path, model: Path, runner: FakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    ping_often(monkeypatch)
    async with (
        started(runtime_dir, model) as (first, first_address),
        started(runtime_dir, model) as (_, second_address),
    ):
        reading = Reading(f"{first_address},{second_address}", num_answers=2)
        await until(lambda: reading.num_tokens() > 20)
        first.send_signal(signal.SIGSTOP)
        goal = reading.num_tokens() + 60
        await until(lambda: reading.num_tokens() > goal)
        first.send_signal(signal.SIGCONT)
        await reading.check()
    await until(lambda: not runner.live)


async def test_a_stopped_gateway_that_is_the_only_one_goes_on_when_it_wakes_up(
    runtime_dir: Path, model: Path, runner: FakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    ping_often(monkeypatch)
    async with started(runtime_dir, model) as (process, address):
        reading = Reading(address, num_answers=2)
        retries: list[object] = []
        for client in reading.clients:
            client.client._route.on_retry = retries.append
        await until(lambda: reading.num_tokens() > 20)
        process.send_signal(signal.SIGSTOP)
        await until(lambda: len(retries) >= len(reading.answers))
        process.send_signal(signal.SIGCONT)
        await reading.check()
    await until(lambda: not runner.live)


@pytest.mark.parametrize("kind", list(ADAPTERS))
async def test_the_next_address_is_taken_where_the_first_refuses(
    runtime_dir: Path, model: Path, runner: FakeRunner, kind: str
) -> None:
    async with started(runtime_dir, model) as (process, address):
        client: Adapter = ADAPTERS[kind](f"127.0.0.1:1, unix:/nobody, {address}")
        assert await client.ask("health") in (True, False)
        (candidate,) = await client.collect(client.generate(PROMPT, seed=1, max_tokens=5))
        assert candidate.token_ids == answer_of(1, PROMPT, 5)
        assert len(await client.ask("list_models")) == 1
        await client.close()
        process.kill()
        await process.wait()
        client = ADAPTERS[kind](f"127.0.0.1:1,{address}")
        with pytest.raises(CannotConnectError, match=f"127.0.0.1:1,{address}"):
            await client.collect(client.generate(PROMPT))
        await client.close()


@contextlib.asynccontextmanager
async def generate(*flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`pagekeeper generate` on a text."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "from pagekeeper.cli.main import main; main()",
        "generate", "q", "--max-tokens", str(len(SPOKEN)), *flags,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=ROOT, env=dict(os.environ),
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
async def test_the_command_shows_nothing_of_a_gateway_that_ends(
    runtime_dir: Path, model: Path, runner: FakeRunner, end: signal.Signals
) -> None:
    runner.script.token = spoken
    runner.script.pauses_at = 30
    async with contextlib.AsyncExitStack() as later:
        async with started(runtime_dir, model, PAGEKEEPER_GRACE_S="0") as (gateway, address):
            text = await later.enter_async_context(generate("--server", address))
            as_json = await later.enter_async_context(generate("--server", address, "-n", "2", "--json"))
            await until(lambda: sum(len(submit.candidates) for submit in runner.live.values()) == 3)
            assert text.stdout is not None
            begun = await text.stdout.readexactly(20)
            gateway.send_signal(end)
            await gateway.wait()
        runner.script.pauses_at = None
        async with started(runtime_dir, model, listen=address):
            out, err = await text.communicate()
            assert ((begun + out).decode(), err, text.returncode) == (WORDS * 3 + "\n", b"", 0)
            out, err = await as_json.communicate()
            assert (err, as_json.returncode) == (b"", 0)
            answer = json.loads(out)
            assert [candidate["text"] for candidate in answer["candidates"]] == [WORDS * 3] * 2
            assert [candidate["token_ids"] for candidate in answer["candidates"]] == [SPOKEN] * 2
            assert answer["usage"]["completion_tokens"] == 2 * len(SPOKEN)
