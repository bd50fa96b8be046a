"""Both Python clients against a gateway over loopback, with a fake runner behind a real Unix socket."""

import asyncio
import gc
import itertools
import math
import re
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagekeeper import (
    AsyncClient,
    BeamSearch,
    CannotConnectError,
    Client,
    DeadlineError,
    DuplicateRequestError,
    InvalidRequestError,
    Message,
    ModelInfo,
    OverloadedError,
    PagekeeperError,
    Resume,
    UnavailableError,
    UnknownModelError,
    Usage,
)
from pagekeeper.common.sockets import RuntimeDir
from pagekeeper.status import to_error
from pagekeeper.v1 import generate_pb2, generate_pb2_grpc
from tests.fakes.gateway import GatewayClient, running_gateway, until
from tests.fakes.gateway_process import started
from tests.fakes.runner import CONTEXT_LENGTH, VOCAB_SIZE, FakeRunner, Script, answer_of, logprobs_of, score_of
from tests.fakes.speech import SPOKEN, WORDS, spoken
from tests.fakes.tokenizer import write_model_directory
from tests.unit.client.adapters import ADAPTERS, Adapter

DOCUMENTATION = Path(__file__).parents[2] / "docs" / "api.md"
PROMPT = [5, 6, 7]
LIMIT = "16,777,216"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model_directory(tmp_path / "tiny")


@pytest.fixture
async def runner(runtime_dir: Path) -> AsyncIterator[FakeRunner]:
    async with FakeRunner(RuntimeDir(runtime_dir).runner_socket("a")) as fake:
        yield fake


@pytest.fixture
async def gateway(runtime_dir: Path, model: Path, runner: FakeRunner) -> AsyncIterator[GatewayClient]:
    async with running_gateway(runtime_dir, model, max_concurrent=64) as running:
        await running.until_serving()
        yield running


@pytest.fixture(params=list(ADAPTERS))
async def client(request: pytest.FixtureRequest, gateway: GatewayClient) -> AsyncIterator[Adapter]:
    adapter: Adapter = ADAPTERS[request.param](gateway.gateway.address)
    yield adapter
    await adapter.close()


async def failure_of(client: Adapter, prompt: Any = PROMPT, **options: Any) -> PagekeeperError:
    with pytest.raises(PagekeeperError) as caught:
        await client.collect(client.generate(prompt, **options))
    assert "\n" not in str(caught.value)
    return caught.value


async def test_an_answer_has_every_token_once_and_says_its_seed_and_usage(client: Adapter) -> None:
    answer = client.generate(PROMPT, seed=1, max_tokens=40)
    positions = []
    while delta := await client.next(answer):
        positions.append((delta.position, len(delta.token_ids)))
    assert all(start + length == following for (start, length), (following, _) in itertools.pairwise(positions))
    (candidate,) = await client.collect(answer)
    assert (candidate.token_ids, candidate.finish_reason) == (answer_of(1, PROMPT, 40), "length")
    assert (answer.seed, answer.usage) == (1, Usage(3, 16, 0, 0, 40))
    assert answer.request_id


async def test_one_message_holds_what_a_stream_joins_to(client: Adapter) -> None:
    streamed = await client.collect(client.generate(PROMPT, seed=1, max_tokens=40))
    whole = client.generate(PROMPT, seed=1, max_tokens=40, stream=False)
    delta = await client.next(whole)
    assert delta is not None
    assert (delta.token_ids, delta.text) == (streamed[0].token_ids, streamed[0].text)
    assert await client.next(whole) is None


async def test_text_of_any_script_comes_back_as_it_was_sent(client: Adapter, runner: FakeRunner) -> None:
    runner.script.token = spoken
    assert await client.text(client.generate(WORDS, max_tokens=len(SPOKEN))) == WORDS * 3
    token_ids = await client.ask("tokenize", WORDS)
    assert list(runner.submits[-1].prompt_token_ids) == token_ids
    assert await client.ask("detokenize", token_ids) == WORDS
    chat = [Message("user", WORDS)]
    await client.collect(client.generate(chat, max_tokens=1))
    assert await client.ask("tokenize", chat) == list(runner.submits[-1].prompt_token_ids)


async def test_a_server_is_asked_for_its_models_and_its_health(client: Adapter, runner: FakeRunner) -> None:
    assert await client.ask("list_models") == [ModelInfo("tiny", VOCAB_SIZE, CONTEXT_LENGTH)]
    assert await client.ask("health") is True
    await runner.die()
    async with asyncio.timeout(20):
        while await client.ask("health"):
            await asyncio.sleep(0.01)


async def test_candidates_come_with_their_logprobs_and_scores(client: Adapter) -> None:
    answer = client.generate(PROMPT, seed=1, max_tokens=12, n=3, logprobs=2, prompt_logprobs=1, echo=True)
    candidates = await client.collect(answer)
    assert [candidate.token_ids for candidate in candidates] == [answer_of(1, PROMPT, 12, index) for index in range(3)]
    for candidate in candidates:
        expected = [logprobs_of(token_id, place, 2) for place, token_id in enumerate(candidate.token_ids)]
        assert [token.logprob for token in candidate.logprobs] == [token.logprob for token in expected]
        assert list(candidate.logprobs[0].top.values()) == [0.0, -math.inf]
        assert candidate.cumulative_logprob == sum(token.logprob for token in candidate.logprobs)
    assert answer.prompt.token_ids == PROMPT
    assert [token and token.token_id for token in answer.prompt.logprobs] == [None, 6, 7]
    assert answer.received == Resume(1, [candidate.token_ids for candidate in candidates], [])
    assert answer.usage == Usage(3, 16, 0, 0, 36)


async def test_a_beam_search_shows_its_beams_and_then_its_hypotheses(client: Adapter) -> None:
    search = BeamSearch(width=4, intermediate=True)
    answer = client.generate(PROMPT, seed=1, max_tokens=12, n=2, beam_search=search)
    shown = await client.intermediate(answer)
    assert shown
    assert shown[-1] == answer.beams
    candidates = await client.collect(answer)
    assert [candidate.token_ids for candidate in candidates] == [answer_of(1, PROMPT, 12, index) for index in range(2)]
    assert [candidate.score for candidate in candidates] == [score_of(0), score_of(1)]
    for beams in shown:
        assert beams[0].token_ids == candidates[0].token_ids[: len(beams[0].token_ids)]


async def test_an_answer_branches_at_any_token_while_it_grows_and_when_it_has_ended(
    client: Adapter, runner: FakeRunner
) -> None:
    runner.script.token = lambda seed, position, prompt: SPOKEN[(len(prompt) - 3 + position) % len(SPOKEN)]
    answer = client.generate(PROMPT, seed=1, max_tokens=len(SPOKEN))
    assert await client.next(answer) is not None
    early = answer.branch(1, max_tokens=len(SPOKEN) - 1)
    await client.collect(answer)
    for branch, position in [(early, 1), *((answer.branch(place), place) for place in range(10, 20))]:
        text = await client.text(branch)
        assert (branch.branch_text + text).startswith(WORDS * 3)
        assert branch.usage.prompt_tokens == 3 + position
        assert branch.candidates[0].token_ids[:5] == SPOKEN[position : position + 5]
    # They are sent at once, and may arrive in any order.
    last = max(runner.submits, key=lambda submit: len(submit.prompt_token_ids))
    assert (list(last.prompt_token_ids), last.sampling.seed != 1) == (PROMPT + SPOKEN[:19], True)
    again = branch.branch(2, n=2, max_tokens=3, seed=4)
    assert [candidate.token_ids for candidate in await client.collect(again)] == [SPOKEN[21:24]] * 2
    with pytest.raises(InvalidRequestError, match="position"):
        answer.branch(len(SPOKEN) + 1)


@pytest.mark.parametrize("end", ["close", "with block", "loop", "drop", "client"])
async def test_closing_an_answer_in_any_way_cancels_it_at_the_runner(
    client: Adapter, gateway: GatewayClient, runner: FakeRunner, end: str
) -> None:
    runner.script.step_s = 0.01
    answer = client.generate(PROMPT, max_tokens=400)
    assert await client.next(answer) is not None
    match end:
        case "close":
            answer.close()
            assert await client.next(answer) is None
        case "with block":
            await client.leave_block(answer)
        case "loop":
            await client.leave_loop(answer)
        case "drop":
            del answer
            gc.collect()
        case "client":
            await client.close()
    await until(lambda: runner.cancels == [submit.request for submit in runner.submits])
    await until(lambda: gateway.admission() == (0, 0))


async def test_an_answer_that_nobody_reads_is_cancelled_when_it_is_dropped(
    client: Adapter, gateway: GatewayClient, runner: FakeRunner
) -> None:
    runner.script.is_paused = True
    answer = client.generate(PROMPT)
    await until(lambda: runner.live)
    del answer
    await until(lambda: runner.cancels)
    await until(lambda: gateway.admission() == (0, 0))


async def test_who_waits_for_an_answer_that_is_closed_waits_no_longer(client: Adapter, runner: FakeRunner) -> None:
    runner.script.is_paused = True
    answer = client.generate(PROMPT)
    waiting = asyncio.create_task(client.next(answer))
    await until(lambda: runner.live)
    answer.close()
    assert await waiting is None
    assert (await client.collect(answer), answer.usage) == ([], None)


async def test_who_waits_for_an_answer_learns_that_the_client_was_closed(client: Adapter, runner: FakeRunner) -> None:
    answer = client.generate(PROMPT, max_tokens=400)
    assert await client.next(answer) is not None
    runner.script.is_paused = True
    waiting = asyncio.create_task(client.collect(answer))
    await asyncio.sleep(0)
    await client.close()
    with pytest.raises(UnavailableError) as caught:
        await waiting
    assert caught.value.tokens_emitted == len(answer.candidates[0].token_ids)


@pytest.mark.parametrize(
    ("field", "prompt", "options"),
    [
        ("text", "", {}),
        ("token_ids", [], {}),
        ("token_ids", [5] * 200_000, {}),
        ("text", "word " * 200_000, {}),
        ("token_ids.token_ids[1]", [5, VOCAB_SIZE], {}),
        ("token_ids.token_ids[0]", [-1], {}),
        ("chat.messages[0].role", [Message("", "Hello")], {}),
        ("sampling.temperature", PROMPT, {"temperature": math.nan}),
        ("sampling.stop", PROMPT, {"stop": ["x"] * 17}),
        ("resume.candidates[0].token_ids[0]", PROMPT, {"resume": Resume(1, [[VOCAB_SIZE]])}),
    ],
)
async def test_a_wrong_field_is_named_and_nobody_else_is_disturbed(
    client: Adapter, field: str, prompt: Any, options: dict[str, Any]
) -> None:
    error = await failure_of(client, prompt, **options)
    assert isinstance(error, InvalidRequestError)
    assert [violation.field for violation in error.violations] == [field]
    assert len(str(error)) < 300
    assert len((await client.collect(client.generate(PROMPT, max_tokens=3)))[0].token_ids) == 3


async def test_a_prompt_over_the_message_limit_is_refused_with_that_limit(
    client: Adapter, gateway: GatewayClient
) -> None:
    neighbour = asyncio.create_task(client.collect(client.generate(PROMPT, seed=3, max_tokens=200)))
    error = await failure_of(client, "x" * (17 * 2**20))
    assert isinstance(error, InvalidRequestError)
    assert LIMIT in str(error)
    with pytest.raises(InvalidRequestError, match=LIMIT):
        await client.ask("tokenize", "x" * (17 * 2**20))
    # A client that lets it out is told the same by the server.
    async with grpc.aio.insecure_channel(gateway.gateway.address) as channel:
        stub = generate_pb2_grpc.GenerateServiceStub(channel)
        request = generate_pb2.GenerateRequest(text="x" * (17 * 2**20), stream=True, request_id="x" * 32)
        with pytest.raises(grpc.RpcError) as refused:
            await stub.Generate(request).read()
    assert str(to_error(refused.value, "")) == str(error)
    assert (await neighbour)[0].token_ids == answer_of(3, PROMPT, 200)


async def test_whoever_must_act_is_told_what_is_wrong(client: Adapter, runner: FakeRunner) -> None:
    assert isinstance(await failure_of(client, model="no such model"), UnknownModelError)
    with pytest.raises(UnknownModelError):
        await client.ask("detokenize", [5], model="no such model")
    runner.script.is_paused = True
    first = client.generate(PROMPT, request_id="mine")
    await until(lambda: runner.live)
    assert isinstance(await failure_of(client, request_id="mine"), DuplicateRequestError)
    assert isinstance(await failure_of(client, timeout_s=0.05), DeadlineError)
    first.close()


@pytest.mark.parametrize("kind", list(ADAPTERS))
async def test_a_full_queue_and_a_drain_are_told_apart(
    runtime_dir: Path, model: Path, runner: FakeRunner, kind: str
) -> None:
    async with running_gateway(runtime_dir, model, max_concurrent=1, max_queue=0) as gateway:
        client: Adapter = ADAPTERS[kind](gateway.gateway.address, resume_for_s=0)
        answer = client.generate(PROMPT)
        assert await client.next(answer) is not None
        runner.script.is_paused = True
        error = await failure_of(client)
        assert isinstance(error, OverloadedError)
        assert error.retry_after_s > 0
        gateway.stop.set()
        with pytest.raises(UnavailableError, match="shutting down"):
            await client.collect(answer)
        await client.close()


@pytest.mark.parametrize("kind", list(ADAPTERS))
async def test_a_server_without_a_runner_is_unavailable(runtime_dir: Path, model: Path, kind: str) -> None:
    async with running_gateway(runtime_dir, model, runner_wait_s=0.05) as gateway:
        client: Adapter = ADAPTERS[kind](gateway.gateway.address, resume_for_s=0.2)
        assert await client.ask("health") is False
        assert type(await failure_of(client)) is UnavailableError
        await client.close()


@pytest.mark.parametrize("kind", list(ADAPTERS))
async def test_a_program_that_resumes_by_itself_goes_on_at_the_next_gateway_after_the_first_was_killed(
    runtime_dir: Path, model: Path, kind: str
) -> None:
    script = Script(step_s=0.002, token=spoken)
    async with FakeRunner(RuntimeDir(runtime_dir).runner_socket("a"), script) as runner:
        async with started(runtime_dir, model) as (process, address):
            client: Adapter = ADAPTERS[kind](address, resume_for_s=0)
            begun = client.generate(PROMPT, seed=9, max_tokens=len(SPOKEN))
            for _ in range(5):
                await client.next(begun)
            process.kill()
            with pytest.raises(UnavailableError) as caught:
                await client.collect(begun)
            received = begun.candidates[0]
            assert caught.value.tokens_emitted == len(received.token_ids) >= 5
            assert begun.received == Resume(9, [received.token_ids], [None])
            # Nobody is there yet, and what was received is still known.
            failed = client.generate(PROMPT, request_id=begun.request_id, resume=begun.received)
            with pytest.raises(CannotConnectError):
                await client.collect(failed)
            assert (failed.received, failed.request_id) == (begun.received, begun.request_id)
            await client.close()
        await until(lambda: not runner.live)
        async with running_gateway(runtime_dir, model) as gateway:
            client = ADAPTERS[kind](gateway.gateway.address)
            rest = client.generate(PROMPT, request_id=failed.request_id, resume=failed.received, max_tokens=len(SPOKEN))
            assert received.text + await client.text(rest) == WORDS * 3
            assert received.token_ids + rest.candidates[0].token_ids == SPOKEN
            assert rest.usage.resumed_tokens == len(received.token_ids)
            await client.close()


async def test_a_stream_that_resumes_takes_over_from_the_one_that_is_still_alive(
    client: Adapter, runner: FakeRunner
) -> None:
    runner.script.step_s = 0.005
    older = client.generate(PROMPT, seed=4, max_tokens=100, request_id="mine")
    assert await client.next(older) is not None
    newer = client.generate(PROMPT, max_tokens=100, request_id="mine", resume=older.received)
    resumed = list(older.received.token_ids[0])
    new = await client.collect(newer)
    assert resumed + new[0].token_ids == answer_of(4, PROMPT, 100)
    with pytest.raises(DuplicateRequestError, match="taken over"):
        await client.collect(older)


async def test_32_streams_share_one_connection_and_leave_no_task(gateway: GatewayClient) -> None:
    faults: list[dict[str, Any]] = []

    async def talk() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        async with AsyncClient(gateway.gateway.address) as client:
            answers = [client.generate(PROMPT, seed=seed, max_tokens=32) for seed in range(32)]
            found = await asyncio.gather(*(answer.collect() for answer in answers))
            assert [each[0].token_ids for each in found] == [answer_of(seed, PROMPT, 32) for seed in range(32)]
            left = [client.generate(PROMPT, max_tokens=400) for _ in range(8)]
            await anext(left[0])
            left.pop()
        del answers, left
        gc.collect()
        await until(lambda: len(asyncio.all_tasks()) == 1)

    # A loop of its own, without the gateway's tasks.
    await asyncio.to_thread(asyncio.run, talk())
    await until(lambda: gateway.admission() == (0, 0))
    assert faults == []


async def test_a_task_that_is_cancelled_stays_cancelled_and_so_does_its_request(
    gateway: GatewayClient, runner: FakeRunner
) -> None:
    runner.script.is_paused = True
    async with AsyncClient(gateway.gateway.address) as client:
        answer = client.generate(PROMPT)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await answer.collect()
        await until(lambda: runner.cancels)
        asking = asyncio.create_task(client.tokenize("x" * 100_000))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert await client.health()


async def test_an_answer_outlives_the_last_reference_to_its_client(gateway: GatewayClient) -> None:
    answer = AsyncClient(gateway.gateway.address).generate(PROMPT, seed=1, max_tokens=20)
    gc.collect()
    assert (await answer.collect())[0].token_ids == answer_of(1, PROMPT, 20)
    synchronous = Client(gateway.gateway.address).generate(PROMPT, seed=1, max_tokens=20)
    gc.collect()
    assert (await asyncio.to_thread(synchronous.collect))[0].token_ids == answer_of(1, PROMPT, 20)


@pytest.mark.parametrize("number", range(4))
async def test_the_examples_in_the_documentation_run(
    gateway: GatewayClient, runner: FakeRunner, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    runner.script.token = spoken
    examples = re.findall(r"```python\n(.*?)```", DOCUMENTATION.read_text(), re.DOTALL)
    assert len(examples) == 4
    program = examples[number].replace("127.0.0.1:50051", gateway.gateway.address)
    await asyncio.to_thread(exec, compile(program, DOCUMENTATION.name, "exec"), {"__name__": "example"})
    assert "Größe, naïve" in capsys.readouterr().out


async def test_several_threads_share_one_client(gateway: GatewayClient) -> None:
    def ask(seed: int) -> list[int]:
        return client.generate(PROMPT, seed=seed, max_tokens=16).collect()[0].token_ids

    with Client(gateway.gateway.address) as client, ThreadPoolExecutor(8) as threads:
        loop = asyncio.get_running_loop()
        found = await asyncio.gather(*(loop.run_in_executor(threads, ask, seed) for seed in range(16)))
    assert found == [answer_of(seed, PROMPT, 16) for seed in range(16)]
