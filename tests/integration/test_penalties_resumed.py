"""Penalties count the tokens of the whole answer, whichever runners and gateways it has been with."""

import asyncio
import random
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from pagekeeper.common.sockets import RuntimeDir
from pagekeeper.v1 import runner_pb2
from tests.fakes.gateway import prompt_request, resuming, running_gateway, until
from tests.fakes.manager import ManagerProcess
from tests.fakes.runner import FakeRunner, Script, answer_of
from tests.fakes.runner_process import RunnerSpawner
from tests.fakes.tokenizer import write_model_directory

PROMPT = [5, 6, 7, 6]
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.25,
    "presence_penalty": 0.5,
    "logit_bias": {44: -1.5, 50: 2.0},
}
# So strong that a count which is off by a few tokens shows soon.
STRONG = PENALTIES | {"frequency_penalty": 1.5, "presence_penalty": 1.0, "temperature": 0.7}
NUM_TOKENS = 400


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model_directory(tmp_path / "tiny")


def known(submit: runner_pb2.Submit) -> dict[int, list[int]]:
    return {candidate.index: list(candidate.generated_token_ids) for candidate in submit.candidates}


async def test_every_further_attempt_has_the_same_parameters_and_the_tokens_to_count(
    runtime_dir: Path, model: Path
) -> None:
    sockets = RuntimeDir(runtime_dir)
    script = Script(step_s=0.01, pauses_at=9)
    request = prompt_request(PROMPT, seed=3, n=2, max_tokens=30, **PENALTIES)
    async with running_gateway(runtime_dir, model) as client, running_gateway(runtime_dir, model) as other:
        first = FakeRunner(sockets.runner_socket("a"), script)
        async with first:
            call = asyncio.create_task(client.generate(request))
            await until(lambda: first.live)
            await until(lambda: len(answers_so_far(client.gateway)) == 2 * 9)
        async with FakeRunner(sockets.runner_socket("b")) as second:
            whole = await call
            assert whole.all_token_ids() == [answer_of(3, PROMPT, 30, index) for index in range(2)]
            received = [whole.candidates[0].token_ids[:12], whole.candidates[1].token_ids[:4]]
            rest = await other.generate(resuming(request, 3, *received))
            assert [[*have, *more] for have, more in zip(received, rest.all_token_ids(), strict=True)] == (
                whole.all_token_ids()
            )
    attempts = [first.submits[0], *second.submits]
    assert [submit.attempt for submit in attempts] == [1, 2, 1]
    # What was generated stays apart from the prompt: only the repetition penalty counts both.
    assert all(list(submit.prompt_token_ids) == PROMPT for submit in attempts)
    so_far = {index: answer_of(3, PROMPT, 9, index) for index in range(2)}
    assert [known(submit) for submit in attempts] == [{0: [], 1: []}, so_far, dict(enumerate(received))]
    assert all(submit.sampling == attempts[0].sampling for submit in attempts)
    sent = attempts[0].sampling
    assert {name: getattr(sent, name) for name in ("frequency_penalty", "presence_penalty")} == {
        "frequency_penalty": 0.25,
        "presence_penalty": 0.5,
    }
    assert sent.repetition_penalty == pytest.approx(1.2)
    assert dict(sent.logit_bias) == PENALTIES["logit_bias"]


def answers_so_far(gateway: Any) -> list[int]:
    """Every token of the one live generation, as its gateway knows them."""
    (live,) = gateway._service._live._live.values()
    return [token for token_ids in live.generation.token_ids.values() for token in token_ids]


@pytest.mark.parametrize("n", [1, 3])
async def test_an_answer_with_penalties_is_the_same_after_its_runner_or_its_gateway_is_lost(
    spawner: RunnerSpawner, runtime_dir: Path, tiny_model: Path, n: int
) -> None:
    prompt = random.Random(0).choices(range(3, 384), k=100)
    request = prompt_request(prompt, seed=3, n=n, max_tokens=NUM_TOKENS, ignore_eos=True, **STRONG)
    async with AsyncExitStack() as ends:
        ends.enter_context(ManagerProcess(runtime_dir, "--pool-size", "4MiB"))
        first = ends.enter_context(spawner.started(runtime_dir, name="a"))
        second = ends.enter_context(spawner.started(runtime_dir, "--standby", name="b"))
        client = await ends.enter_async_context(running_gateway(runtime_dir, tiny_model))
        await client.until_runners(2)
        whole = await client.generate(request)
        without = prompt_request(prompt, seed=3, n=n, max_tokens=20, ignore_eos=True, temperature=STRONG["temperature"])
        assert (await client.generate(without)).token_ids != whole.token_ids[:20]

        other = await ends.enter_async_context(running_gateway(runtime_dir, tiny_model))
        await other.until_runners(2)
        received = [token_ids[: 7 + 50 * index] for index, token_ids in enumerate(whole.all_token_ids())]
        rest = await other.generate(resuming(request, 3, *received))
        for have, more, expected in zip(received, rest.all_token_ids(), whole.all_token_ids(), strict=True):
            assert [*have, *more] == expected
        assert all(whole.candidates[index].text.endswith(rest.candidates[index].text) for index in range(n))

        call = asyncio.create_task(client.generate(request))
        await until(lambda: client.gateway._service._live._live and len(answers_so_far(client.gateway)) > 20 * n)
        first.kill()
        moved = await call
        assert second.report().step > 0
        assert moved.all_token_ids() == whole.all_token_ids()
        assert [candidate.text for candidate in moved.candidates.values()] == [
            candidate.text for candidate in whole.candidates.values()
        ]
