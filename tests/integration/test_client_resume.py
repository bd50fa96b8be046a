"""Both Python clients over connections that are cut anywhere, against a gateway with a fake runner."""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagekeeper import Candidate, PagekeeperError, SlowReaderError, UnavailableError
from pagekeeper.common.sockets import RuntimeDir
from pagekeeper.v1.generate_pb2 import GenerateRequest, Resume, TokenIds
from tests.fakes.cutting_proxy import CuttingProxy
from tests.fakes.gateway import GatewayClient, running_gateway, until
from tests.fakes.runner import FakeRunner, Script, seed_of
from tests.fakes.speech import SPOKEN, WORDS, spoken
from tests.fakes.tokenizer import END_OF_TURN_ID, write_model_directory
from tests.unit.client.adapters import ADAPTERS, Adapter

PROMPT = [5, 6, 7]


@pytest.fixture
async def runner(runtime_dir: Path) -> AsyncIterator[FakeRunner]:
    script = Script(token=spoken, step_s=0.002)
    async with FakeRunner(RuntimeDir(runtime_dir).runner_socket("a"), script) as fake:
        yield fake


@pytest.fixture
async def gateway(runtime_dir: Path, tmp_path: Path, runner: FakeRunner) -> AsyncIterator[GatewayClient]:
    model = write_model_directory(tmp_path / "tiny")
    async with running_gateway(runtime_dir, model, max_concurrent=64) as running:
        await running.until_serving()
        yield running


@pytest.fixture(params=list(ADAPTERS))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


REQUESTS: list[dict[str, Any]] = [
    {"seed": 1, "max_tokens": len(SPOKEN)},
    {"n": 3, "logprobs": 2, "echo": True, "prompt_logprobs": 1, "max_tokens": 50},
    {"stop": ["東京"], "max_tokens": 100},
    {"stop": ["東京"], "include_stop_str": True, "min_tokens": 30, "n": 2, "max_tokens": 100},
    {"stream": False, "max_tokens": 40},
]


def comparable(answer: Any, candidates: list[Candidate]) -> Any:
    """What does not depend on how often the connection was cut."""
    usage = replace(answer.usage, cached_tokens=0, resumed_tokens=0, recomputed_tokens=0)
    return candidates, answer.prompt, usage


@pytest.mark.parametrize("leaves_server", [False, True])
@pytest.mark.parametrize("seed", range(3))
async def test_answers_over_a_connection_that_is_cut_anywhere_are_those_of_a_whole_one(
    gateway: GatewayClient, kind: str, seed: int, leaves_server: bool
) -> None:
    rng = random.Random(seed)
    whole: Adapter = ADAPTERS[kind](gateway.gateway.address)
    expected = []
    for request in REQUESTS:
        answer = whole.generate(PROMPT, **request)
        expected.append(comparable(answer, await whole.collect(answer)))
    await whole.close()

    # The first one comes after the server has been reached; who never reached it does not wait for it.
    cuts = [500, *(rng.choice([rng.randrange(1, 200), rng.randrange(200, 4000)]) for _ in range(12))]
    async with CuttingProxy(gateway.gateway.address, cuts, leaves_server=leaves_server) as proxy:
        client: Adapter = ADAPTERS[kind](proxy.address)
        answers = [client.generate(PROMPT, **request) for request in REQUESTS]
        found = await asyncio.gather(*map(client.collect, answers))
        assert [comparable(*pair) for pair in zip(answers, found, strict=True)] == expected
        assert answers[0].candidates[0].text == WORDS * 3
        assert proxy.num_connections > 1
        await client.close()
    await until(lambda: gateway.admission() == (0, 0))


async def test_a_lost_stream_that_still_waits_at_the_gateway_is_taken_over(
    gateway: GatewayClient, runner: FakeRunner, kind: str
) -> None:
    runner.script.is_paused = True
    async with CuttingProxy(gateway.gateway.address, leaves_server=True) as proxy:
        client: Adapter = ADAPTERS[kind](proxy.address)
        answer = client.generate(PROMPT, seed=2, max_tokens=20, request_id="mine", echo=True)
        reading = asyncio.create_task(client.collect(answer))
        await until(lambda: runner.live)
        await proxy.cut()
        await until(lambda: len(runner.submits) == 2)
        assert len(runner.live) == 1
        runner.script.is_paused = False
        (candidate,) = await reading
        assert len(candidate.token_ids) == 20
        assert answer.prompt.token_ids == PROMPT
        await client.close()


async def test_a_candidate_that_has_ended_is_not_made_again_when_the_others_go_on(
    gateway: GatewayClient, runner: FakeRunner, kind: str
) -> None:
    second = seed_of(2, 1)
    runner.script.token = lambda seed, position, prompt: (
        END_OF_TURN_ID if seed == second and position == 3 else spoken(seed, position, prompt)
    )
    runner.script.pauses_at = 8
    async with CuttingProxy(gateway.gateway.address) as proxy:
        client: Adapter = ADAPTERS[kind](proxy.address)
        answer = client.generate(PROMPT, seed=2, n=2, max_tokens=len(SPOKEN))
        reading = asyncio.create_task(client.collect(answer))
        await until(lambda: [len(answer._token_ids(index)) for index in range(2)] == [8, 3])
        await proxy.cut()
        await until(lambda: len(runner.submits) == 2)
        runner.script.pauses_at = None
        candidates = await reading
        assert [candidate.index for candidate in runner.submits[1].candidates] == [0]
        assert [(candidate.token_ids, candidate.finish_reason) for candidate in candidates] == [
            (SPOKEN, "length"),
            (SPOKEN[:3], "stop"),
        ]
        assert answer.usage.completion_tokens == len(SPOKEN) + 3
        await client.close()


async def test_a_lost_call_that_comes_late_and_takes_over_is_taken_over_in_turn(
    gateway: GatewayClient, runner: FakeRunner, kind: str
) -> None:
    runner.script.pauses_at = 5
    retries: list[PagekeeperError] = []
    async with CuttingProxy(gateway.gateway.address, leaves_server=True) as proxy:
        client: Adapter = ADAPTERS[kind](proxy.address, on_retry=retries.append)
        answer = client.generate(PROMPT, seed=2, max_tokens=20, request_id="mine")
        reading = asyncio.create_task(client.collect(answer))
        await until(lambda: runner.live)
        await proxy.cut()
        await until(lambda: len(runner.submits) == 2)
        # As if the gateway had read the broken connection only now, with a call on it that had resumed.
        late = gateway.stub.Generate(
            GenerateRequest(token_ids=TokenIds(token_ids=PROMPT), request_id="mine", resume=Resume(seed=2))
        )
        await until(lambda: len(runner.submits) == 4)
        # The first connection may break before anything of the answer has come, which is an error of another name.
        assert len(retries) == 2
        assert isinstance(retries[1], UnavailableError)
        runner.script.pauses_at = None
        (candidate,) = await reading
        assert len(candidate.token_ids) == 20
        late.cancel()
        await client.close()


async def test_leaving_an_answer_that_has_gone_on_ends_it_at_the_runner(
    gateway: GatewayClient, runner: FakeRunner, kind: str
) -> None:
    runner.script.step_s = 0.01
    async with CuttingProxy(gateway.gateway.address, [500]) as proxy:
        retries: list[PagekeeperError] = []
        client: Adapter = ADAPTERS[kind](proxy.address, on_retry=retries.append)
        answer = client.generate(PROMPT, max_tokens=400)
        while not retries:
            assert await client.next(answer) is not None
        await client.leave_loop(answer)
        await until(lambda: not runner.live)
        await until(lambda: gateway.admission() == (0, 0))
        await client.close()


async def test_an_answer_branches_from_tokens_of_several_streams(gateway: GatewayClient, kind: str) -> None:
    async with CuttingProxy(gateway.gateway.address, [400, 600]) as proxy:
        client: Adapter = ADAPTERS[kind](proxy.address)
        answer = client.generate(PROMPT, max_tokens=len(SPOKEN))
        await client.collect(answer)
        assert proxy.num_connections == 3
        branch = answer.branch(30, max_tokens=4)
        await client.collect(branch)
        assert branch.usage.prompt_tokens == 33
        await client.close()


async def test_a_reader_that_was_too_slow_goes_on_when_it_comes_back(
    gateway: GatewayClient, runner: FakeRunner, kind: str
) -> None:
    retries: list[PagekeeperError] = []
    client: Adapter = ADAPTERS[kind](gateway.gateway.address, on_retry=retries.append)
    answer = client.generate(PROMPT, max_tokens=len(SPOKEN))
    assert await client.next(answer) is not None
    for live in list(gateway.gateway._service._live._live.values()):
        live.end(SlowReaderError("the stream is not being read"))
    assert await client.text(answer) == WORDS * 3
    assert [type(error) for error in retries] == [SlowReaderError]
    await client.close()


@pytest.mark.parametrize("grace_s", [0.0, 20.0])
async def test_a_gateway_that_drains_hands_its_answers_to_another(
    runtime_dir: Path, tmp_path: Path, runner: FakeRunner, kind: str, grace_s: float
) -> None:
    model = write_model_directory(tmp_path / "tiny")
    async with (
        running_gateway(runtime_dir, model, grace_s=grace_s) as first,
        running_gateway(runtime_dir, model) as second,
    ):
        await first.until_serving()
        await second.until_serving()
        client: Adapter = ADAPTERS[kind](f"{first.gateway.address},{second.gateway.address}")
        answer = client.generate(PROMPT, max_tokens=len(SPOKEN))
        assert await client.next(answer) is not None
        first.stop.set()
        await until(lambda: first.gateway._service._is_draining)
        # What is new goes elsewhere in any case, what is live when the grace is over.
        assert await client.text(client.generate(PROMPT, max_tokens=len(SPOKEN))) == WORDS * 3
        assert await client.text(answer) == WORDS * 3
        await first.serving
        await client.close()


async def test_an_answer_that_was_silent_for_longer_than_its_client_waits_leaves_a_gateway_that_drains(
    runtime_dir: Path, tmp_path: Path, runner: FakeRunner, kind: str
) -> None:
    model = write_model_directory(tmp_path / "tiny")
    async with running_gateway(runtime_dir, model) as first, running_gateway(runtime_dir, model) as second:
        await first.until_serving()
        await second.until_serving()
        client: Adapter = ADAPTERS[kind](f"{first.gateway.address},{second.gateway.address}", resume_for_s=30)
        runner.script.is_paused = True
        answer = client.generate(PROMPT, max_tokens=len(SPOKEN))
        reading = asyncio.create_task(client.text(answer))
        await until(lambda: runner.live)
        answer._attempts._quiet_since -= 3600
        first.stop.set()
        await until(lambda: len(runner.submits) == 2)
        runner.script.is_paused = False
        assert await reading == WORDS * 3
        await client.close()
