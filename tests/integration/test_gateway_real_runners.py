"""The gateway with real runners on one real cache manager: what one has computed, the other finds."""

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from pagekeeper.v1.generate_pb2 import GenerateRequest
from tests.fakes.gateway import Answer, GatewayClient, prompt_request, running_gateway, until
from tests.fakes.manager import ManagerProcess
from tests.fakes.runner_process import RunnerProcess, RunnerSpawner

POOL = ("--pool-size", "4MiB")
BLOCK_SIZE = 16
PROMPT = random.Random(0).choices(range(3, 384), k=512)


@asynccontextmanager
async def stack(
    spawner: RunnerSpawner, runtime_dir: Path, model: Path, **flags: tuple[str, ...]
) -> AsyncIterator[tuple[GatewayClient, ManagerProcess, dict[str, RunnerProcess]]]:
    """A manager, runners by name with these flags, and a gateway that knows them all; in the end nothing is left."""
    async with AsyncExitStack() as ends:
        manager = ends.enter_context(ManagerProcess(runtime_dir, *POOL))
        runners = {
            name: ends.enter_context(spawner.started(runtime_dir, *more, name=name)) for name, more in flags.items()
        }
        client = await ends.enter_async_context(running_gateway(runtime_dir, model))
        await client.until_runners(len(runners))
        yield client, manager, runners
        await until(lambda: manager.stats().pool.free_blocks == manager.stats().pool.total_blocks - 1)
        assert list(manager.audit().violations) == []


def request_of(seed: int, n: int = 1, max_tokens: int = 60) -> GenerateRequest:
    return prompt_request([seed + 3, *PROMPT], seed=seed, n=n, max_tokens=max_tokens, ignore_eos=True)


@pytest.mark.parametrize("n", [1, 3])
async def test_a_prompt_goes_from_one_runner_to_the_other_and_hardly_any_of_it_is_computed_again(
    spawner: RunnerSpawner, runtime_dir: Path, tiny_model: Path, n: int
) -> None:
    began = time.monotonic()
    roles = {"p": ("--role", "prefill"), "d": ("--role", "decode")}
    async with stack(spawner, runtime_dir, tiny_model, **roles) as (client, _, runners):
        split = [await client.generate(request_of(seed, n)) for seed in range(2)]
        # The prompts, in chunks; and an idle engine steps four times a second at most.
        assert runners["p"].report().step < 20 + 4 * (time.monotonic() - began)
        assert runners["d"].report().step > 100
        for answer in split:
            assert answer.usage is not None
            assert 0 <= answer.usage.recomputed_tokens <= BLOCK_SIZE
            assert answer.usage.completion_tokens == 60 * n
        runners["p"].kill()
        await client.until_runners(1)
        for seed, answer in enumerate(split):
            assert same(await client.generate(request_of(seed, n)), answer)


async def test_the_streams_of_a_draining_runner_go_on_at_the_other_from_the_cache(
    spawner: RunnerSpawner, runtime_dir: Path, tiny_model: Path
) -> None:
    async with stack(spawner, runtime_dir, tiny_model, a=(), b=("--standby",)) as (client, _, runners):
        expected = await asyncio.gather(*(client.generate(request_of(seed, max_tokens=200)) for seed in range(4)))
        calls = [asyncio.create_task(client.generate(request_of(seed, max_tokens=200))) for seed in range(4)]
        await until(lambda: runners["a"].report().running == 4)
        runners["a"].signal(signal.SIGTERM)
        for call, whole in zip(calls, expected, strict=True):
            answer = await call
            assert same(answer, whole)
            assert answer.usage is not None
            assert answer.usage.recomputed_tokens <= BLOCK_SIZE
        assert runners["b"].report().step > 0
        assert runners["a"].wait() == 0


async def test_a_runner_that_is_stopped_and_wakes_up_has_lost_its_streams_and_serves_again(
    spawner: RunnerSpawner, runtime_dir: Path, tiny_model: Path
) -> None:
    async with stack(spawner, runtime_dir, tiny_model, a=(), b=("--standby",)) as (client, _, runners):
        whole = await client.generate(request_of(1, max_tokens=400))
        call = asyncio.create_task(client.generate(request_of(1, max_tokens=400)))
        await until(lambda: runners["a"].report().running == 1)
        runners["a"].signal(signal.SIGSTOP)
        assert same(await call, whole)
        assert runners["b"].report().step > 0
        runners["a"].signal(signal.SIGCONT)
        await client.until_runners(2)
        runners["b"].kill()
        await client.until_runners(1)
        assert same(await client.generate(request_of(1, max_tokens=400)), whole)


def same(one: Answer, other: Answer) -> bool:
    return one.all_token_ids() == other.all_token_ids() and one.text == other.text
