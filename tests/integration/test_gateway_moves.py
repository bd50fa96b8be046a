"""Streams that go from one live runner to another: it drains, retires, hands over, or has a smaller context."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import pytest

from gateway.generation import Generation
from pagekeeper.common.sockets import RuntimeDir
from pagekeeper.v1 import generate_pb2, runner_pb2, types_pb2
from tests.fakes.gateway import (
    GatewayClient,
    failure,
    generate_some,
    prompt_request,
    running_gateway,
    until,
    wrong_fields,
)
from tests.fakes.runner import FakeRunner, Script, answer_of, logprobs_of, seed_of
from tests.fakes.tokenizer import END_OF_TURN_ID, write_model_directory

PROMPT = [5, 6, 7]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model_directory(tmp_path / "tiny")


@pytest.fixture
def sockets(runtime_dir: Path) -> RuntimeDir:
    return RuntimeDir(runtime_dir)


@asynccontextmanager
async def two_runners(
    sockets: RuntimeDir, model: Path, first: Script, second: Script
) -> AsyncIterator[tuple[GatewayClient, FakeRunner, FakeRunner]]:
    """A gateway and two runners that it knows."""
    async with AsyncExitStack() as stack:
        runners = [
            await stack.enter_async_context(FakeRunner(sockets.runner_socket(name), script))
            for name, script in (("a", first), ("b", second))
        ]
        client = await stack.enter_async_context(running_gateway(sockets.path, model))
        await client.until_runners(2)
        yield client, runners[0], runners[1]


def by_role(**fields: float) -> tuple[Script, Script]:
    """How two runners behave of which one is for prompts and the other for what follows."""
    return Script(role=runner_pb2.ROLE_PREFILL, **fields), Script(role=runner_pb2.ROLE_DECODE, **fields)


def late(submit: runner_pb2.Submit, attempt: int) -> runner_pb2.ServeResponse:
    """What a runner might still have to say of an attempt: other tokens, an end, a refusal."""
    ids = {"request": submit.request, "attempt": attempt}
    outputs = [
        *(runner_pb2.SequenceOutput(**ids, position=position, token_ids=[300] * 3) for position in range(20)),
        runner_pb2.SequenceOutput(**ids, position=3, finish_reason=types_pb2.FINISH_REASON_STOP),
        runner_pb2.SequenceOutput(**ids, refusal={"code": runner_pb2.Refusal.CODE_DRAINING}),
        runner_pb2.SequenceOutput(**ids, refusal={"code": runner_pb2.Refusal.CODE_INTERNAL}),
    ]
    beams = [runner_pb2.BeamOutput(**ids, beams=[{"token_ids": [300]}])]
    return runner_pb2.ServeResponse(step=runner_pb2.StepOutput(step=1, outputs=outputs, beams=beams))


async def test_the_streams_of_a_draining_runner_move_at_once_and_its_late_output_is_void(
    model: Path, sockets: RuntimeDir
) -> None:
    standby = Script(is_standby=True, step_s=0.01)
    async with two_runners(sockets, model, Script(step_s=0.01), standby) as (client, first, second):
        answers = asyncio.create_task(generate_some(client, 8, 60))
        await until(lambda: len(first.live) == 8)
        first.drain()
        await until(lambda: len(second.live) == 8)
        assert not first.live
        for submit in list(first.submits):
            first.say(late(submit, attempt=1))
        for index, answer in enumerate(await answers):
            assert answer.token_ids == answer_of(index, [*PROMPT, index], 60)
        assert [submit.attempt for submit in second.submits] == [2] * 8
        assert await client.is_serving()


async def test_a_lone_draining_runner_finishes_what_it_has(runtime_dir: Path, model: Path, sockets: RuntimeDir) -> None:
    async with (
        FakeRunner(sockets.runner_socket("a"), Script(step_s=0.01)) as first,
        running_gateway(runtime_dir, model) as client,
    ):
        answers = asyncio.create_task(generate_some(client, 4, 40))
        await until(lambda: len(first.live) == 4)
        first.drain()
        await client.until_serving(False)
        late = asyncio.create_task(client.generate(prompt_request(PROMPT, seed=9, max_tokens=5)))
        for index, answer in enumerate(await answers):
            assert answer.token_ids == answer_of(index, [*PROMPT, index], 40)
        assert (len(first.submits), first.cancels) == (4, [])
        async with FakeRunner(sockets.runner_socket("b")):
            assert (await late).token_ids == answer_of(9, PROMPT, 5)


async def test_a_retired_runners_streams_go_on_at_its_successor_however_often(
    runtime_dir: Path, model: Path, sockets: RuntimeDir
) -> None:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(running_gateway(runtime_dir, model))
        call = asyncio.create_task(client.generate(prompt_request(PROMPT, seed=1, max_tokens=50)))
        for stay in range(8):
            pauses_at = None if stay == 7 else 0  # never a token: more losses in a row than are forgiven
            runner = FakeRunner(sockets.runner_socket("a"), Script(pauses_at=pauses_at))
            await stack.enter_async_context(runner)
            await until(lambda: runner.submits)  # noqa: B023 - awaited here
            if stay < 7:
                await runner.retire()
        answer = await call
        assert answer.token_ids == answer_of(1, PROMPT, 50)
        assert runner.submits[0].attempt == 8


async def test_a_runner_that_drains_before_it_is_ready_is_never_used(
    runtime_dir: Path, model: Path, sockets: RuntimeDir
) -> None:
    async with (
        FakeRunner(sockets.runner_socket("a"), Script(answers_pings=False)) as first,
        running_gateway(runtime_dir, model) as client,
    ):
        await until(lambda: first.streams)
        first.drain()
        first.script.answers_pings = True
        call = asyncio.create_task(client.generate(prompt_request(PROMPT, seed=1, max_tokens=5)))
        async with FakeRunner(sockets.runner_socket("b")):
            assert (await call).token_ids == answer_of(1, PROMPT, 5)
        assert not first.submits


@pytest.mark.parametrize("n", [1, 4])
async def test_an_answer_goes_from_the_prompts_runner_to_the_other_with_every_token_once(
    model: Path, sockets: RuntimeDir, n: int
) -> None:
    async with two_runners(sockets, model, *by_role()) as (client, first, second):
        request = prompt_request(PROMPT, seed=1, max_tokens=30, n=n, logprobs=1, prompt_logprobs=0, echo=True)
        answer = await client.generate(request)
        for index in range(n):
            candidate = answer.candidates[index]
            assert candidate.token_ids == answer_of(1, PROMPT, 30, index)
            expected = [logprobs_of(token_id, place, 1) for place, token_id in enumerate(candidate.token_ids)]
            assert candidate.logprobs == expected
            assert candidate.last.cumulative_logprob == sum(token.logprob for token in expected)
        assert len(answer.first.prompt.logprobs) == 2
        (begun,), (rest,) = first.submits, second.submits
        assert (begun.sampling.max_tokens, rest.sampling.max_tokens) == (1, 30)
        assert [list(candidate.generated_token_ids) for candidate in rest.candidates] == [
            answer_of(1, PROMPT, 1, index) for index in range(n)
        ]
        assert not rest.sampling.HasField("prompt_logprobs")
        assert (answer.usage.completion_tokens, answer.usage.recomputed_tokens) == (30 * n, n)


async def test_an_answer_of_one_token_stays_with_the_prompts_runner(model: Path, sockets: RuntimeDir) -> None:
    async with two_runners(sockets, model, *by_role()) as (client, first, second):
        answer = await client.generate(prompt_request(PROMPT, seed=1, max_tokens=1))
        assert (answer.token_ids, answer.finish_reason) == (answer_of(1, PROMPT, 1), types_pb2.FINISH_REASON_LENGTH)
        assert (len(first.submits), len(second.submits)) == (1, 0)


async def test_a_stop_token_in_the_first_place_ends_its_candidate_there(model: Path, sockets: RuntimeDir) -> None:
    def token(seed: int, position: int, prompt: Sequence[int]) -> int:
        return END_OF_TURN_ID if seed == seed_of(1, 1) or position == 9 else 10

    scripts = by_role()
    for script in scripts:
        script.token = token
    async with two_runners(sockets, model, *scripts) as (client, _, second):
        answer = await client.generate(prompt_request(PROMPT, seed=1, n=3))
        assert answer.all_token_ids() == [[10] * 9, [], [10] * 9]
        assert [candidate.index for candidate in second.submits[0].candidates] == [0, 2]


@pytest.mark.parametrize("candidates", [1, 3])
async def test_a_stop_string_in_the_first_token_ends_the_answer_there_or_elsewhere(
    model: Path, sockets: RuntimeDir, candidates: int
) -> None:
    scripts = by_role()
    for script in scripts:
        script.token = lambda seed, position, prompt: 71  # a letter
    async with two_runners(sockets, model, *scripts) as (client, first, second):
        letter = (await client.stub.Detokenize(generate_pb2.DetokenizeRequest(token_ids=[71]))).text
        answer = await client.generate(prompt_request(PROMPT, seed=1, n=candidates, stop=[letter]))
        assert [answer.candidates[index].text for index in range(candidates)] == [""] * candidates
        assert answer.all_token_ids() == [[71]] * candidates
        await until(lambda: not first.live and not second.live)
        assert client.admission() == (0, 0)


async def test_a_prompts_runner_that_dies_in_between_leaves_no_token_out(model: Path, sockets: RuntimeDir) -> None:
    async with two_runners(sockets, model, *by_role(step_s=0.005)) as (client, first, second):
        first.script.is_paused = True
        answers = asyncio.create_task(generate_some(client, 4, 30))
        await until(lambda: len(first.live) == 4)
        first.script.is_paused = False
        await until(lambda: second.submits)
        await first.die()
        for index, answer in enumerate(await answers):
            assert answer.token_ids == answer_of(index, [*PROMPT, index], 30)


async def test_a_client_that_leaves_behind_its_first_token_is_cancelled_at_the_second_runner(
    model: Path, sockets: RuntimeDir
) -> None:
    async with two_runners(sockets, model, *by_role()) as (client, first, second):
        second.script.is_paused = True
        call = client.stub.Generate(prompt_request(PROMPT, max_tokens=40))
        await until(lambda: second.live)
        call.cancel()
        await until(lambda: not second.live and client.admission() == (0, 0))
        assert first.cancels == []


async def test_case_14_no_accepted_request_is_too_long_for_the_next_runner(model: Path, sockets: RuntimeDir) -> None:
    """Case 14: with several runners the limit is the smallest one's, the same in the list of models and in errors."""
    async with two_runners(sockets, model, Script(context_length=64), Script()) as (client, first, _):
        (listed,) = (await client.stub.ListModels(generate_pb2.ListModelsRequest())).models
        assert listed.max_context_length == 64
        code, status = await failure(client.stub.Generate(prompt_request([5] * 64)))
        assert (code, wrong_fields(status)) == (grpc.StatusCode.INVALID_ARGUMENT, ["token_ids"])
        assert "at most 63" in status.message
        await first.die()
        await client.until_runners(1)
        answer = await client.generate(prompt_request([5] * 64, max_tokens=5))
        assert len(answer.token_ids) == 5


@pytest.mark.parametrize("prompt_length", [3, 100])
async def test_an_answer_that_a_smaller_runner_has_no_room_for_waits_for_a_bigger_one(
    runtime_dir: Path, model: Path, sockets: RuntimeDir, prompt_length: int
) -> None:
    prompt = [5] * prompt_length
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(running_gateway(runtime_dir, model))
        async with FakeRunner(sockets.runner_socket("a"), Script(pauses_at=10)):
            call = asyncio.create_task(client.generate(prompt_request(prompt, seed=1, max_tokens=80)))
            generation = await first_generation(client)
            await until(lambda: len(generation.token_ids[0]) == 10)
        small = await stack.enter_async_context(FakeRunner(sockets.runner_socket("b"), Script(context_length=64)))
        reached = 61 if prompt_length == 3 else 10
        await until(lambda: len(generation.token_ids[0]) == reached and client.gateway._runners._router.num_waiting)
        await client.until_serving()
        await stack.enter_async_context(FakeRunner(sockets.runner_socket("a")))
        assert (await call).token_ids == answer_of(1, prompt, 80)
        assert len(small.submits) == (prompt_length == 3)


async def first_generation(client: GatewayClient) -> Generation:
    """The one that is live, once it is."""
    places = client.gateway._runners._router._places
    await until(lambda: places)
    return next(iter(places.values())).generation
