"""Requests that resume: whatever the client has, it gets the rest, once."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagekeeper.common.sockets import RuntimeDir
from pagekeeper.v1 import types_pb2
from pagekeeper.v1.generate_pb2 import Branch, GenerateRequest, Resume
from tests.fakes.gateway import Answer, GatewayClient, failure, prompt_request, resuming, running_gateway, until
from tests.fakes.runner import FakeRunner, answer_of
from tests.fakes.tokenizer import END_OF_TURN_ID, byte_level_tokenizer, write_model_directory

PROMPT = [5, 6, 7]
STOP, LENGTH = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH
# Many words, some of whose tokens are parts of characters.
SPOKEN = byte_level_tokenizer().encode("The owl 🦉 said: naïve café 東京, and the fox said so too. STOP here. " * 4).ids


def spoken(seed: int, position: int, prompt: Sequence[int]) -> int:
    """A runner that recites."""
    return SPOKEN[position % len(SPOKEN)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model_directory(tmp_path / "tiny")


@pytest.fixture
async def runner(runtime_dir: Path) -> AsyncIterator[FakeRunner]:
    async with FakeRunner(RuntimeDir(runtime_dir).runner_socket("a")) as fake:
        yield fake


@pytest.fixture
async def client(runtime_dir: Path, model: Path, runner: FakeRunner) -> AsyncIterator[GatewayClient]:
    async with running_gateway(runtime_dir, model) as running:
        yield running


def named(**sampling: Any) -> GenerateRequest:
    request = prompt_request(PROMPT, **sampling)
    request.request_id = "mine"
    return request


async def test_a_resumed_stream_goes_on_behind_the_tokens_that_the_client_has(
    client: GatewayClient, runner: FakeRunner
) -> None:
    runner.script.token = spoken
    request = prompt_request(PROMPT, seed=1, max_tokens=60, stop=["so too"])
    whole = await client.generate(request)
    for received in (1, 5, 17, len(whole.token_ids) - 1):
        first = byte_level_tokenizer().decode(whole.token_ids[:received])
        candidate = Resume.Candidate(token_ids=whole.token_ids[:received])
        request.resume.CopyFrom(Resume(candidates=[candidate], seed=1))
        rest = await client.generate(request)
        assert (rest.first_position, rest.seed) == (received, 1)
        assert whole.token_ids[:received] + rest.token_ids == whole.token_ids
        assert whole.text.endswith(rest.text)
        assert len(first.rstrip("\ufffd")) + len(rest.text) >= len(whole.text)
        assert (rest.usage.resumed_tokens, rest.usage.completion_tokens) == (received, len(whole.token_ids))
        assert list(runner.submits[-1].candidates[0].generated_token_ids) == whole.token_ids[:received]


async def test_a_resumed_stream_takes_over_the_live_one(client: GatewayClient, runner: FakeRunner) -> None:
    runner.script.step_s = 0.01
    request = prompt_request(PROMPT, seed=1, max_tokens=50)
    request.request_id = "mine"
    older = client.stub.Generate(request)
    first = await anext(aiter(older))
    request.resume.CopyFrom(Resume(candidates=[Resume.Candidate(token_ids=first.deltas[0].token_ids)], seed=1))
    newer = await client.generate(request)
    assert [*first.deltas[0].token_ids, *newer.token_ids] == answer_of(1, PROMPT, 50)
    assert (await failure(older))[0] == grpc.StatusCode.ALREADY_EXISTS
    assert runner.cancels == [runner.submits[0].request]


async def test_a_resumed_stream_keeps_its_permit_from_those_that_wait(
    runtime_dir: Path, model: Path, runner: FakeRunner
) -> None:
    runner.script.pauses_at = 5
    async with running_gateway(runtime_dir, model, max_concurrent=1, max_queue=1) as client:
        request = prompt_request(PROMPT, seed=1, max_tokens=10)
        request.request_id = "mine"
        older = client.stub.Generate(request)
        await until(lambda: client.admission() == (1, 0))
        waiting = asyncio.create_task(client.generate(prompt_request(PROMPT, seed=2, max_tokens=10)))
        await until(lambda: client.admission() == (1, 1))
        request.resume.CopyFrom(Resume(candidates=[Resume.Candidate(token_ids=answer_of(1, PROMPT, 3))], seed=1))
        newer = asyncio.create_task(client.generate(request))
        await until(lambda: len(runner.submits) == 2)
        assert client.admission() == (1, 1)
        assert (await failure(older))[0] == grpc.StatusCode.ALREADY_EXISTS
        runner.script.pauses_at = None
        assert (await newer).token_ids == answer_of(1, PROMPT, 10)[3:]
        assert (await waiting).token_ids == answer_of(2, PROMPT, 10)
        assert [submit.sampling.seed for submit in runner.submits] == [1, 1, 2]


async def test_tokens_that_end_the_answer_already_need_no_runner(client: GatewayClient, runner: FakeRunner) -> None:
    said = byte_level_tokenizer().encode("one STOP two").ids
    for token_ids, sampling, reason, kept in [
        (SPOKEN[:20], {"max_tokens": 20}, LENGTH, 20),
        ([10, 11, END_OF_TURN_ID], {}, STOP, 2),
        (said, {"stop": ["STOP"]}, STOP, None),
    ]:
        request = prompt_request(PROMPT, **sampling)
        request.resume.CopyFrom(Resume(candidates=[Resume.Candidate(token_ids=token_ids)], seed=1))
        answer = await client.generate(request)
        assert (answer.token_ids, answer.finish_reason) == ([], reason)
        assert kept in (None, answer.first_position)
        assert answer.usage.completion_tokens == answer.first_position
    assert not runner.submits


async def test_a_resumed_stream_takes_the_place_in_the_queue_of_the_one_that_waits(
    runtime_dir: Path, model: Path, runner: FakeRunner
) -> None:
    runner.script.pauses_at = 5
    async with running_gateway(runtime_dir, model, max_concurrent=1) as client:
        occupant = asyncio.create_task(client.generate(prompt_request(PROMPT, seed=1, max_tokens=10)))
        await until(lambda: client.admission() == (1, 0))
        older = client.stub.Generate(named(seed=2, max_tokens=10))
        await until(lambda: client.admission() == (1, 1))
        behind = asyncio.create_task(client.generate(prompt_request(PROMPT, seed=3, max_tokens=10)))
        await until(lambda: client.admission() == (1, 2))
        newer = asyncio.create_task(client.generate(resuming(named(max_tokens=10), 2, answer_of(2, PROMPT, 3))))
        assert (await failure(older))[0] == grpc.StatusCode.ALREADY_EXISTS
        assert client.admission() == (1, 2)
        runner.script.pauses_at = None
        assert (await newer).token_ids == answer_of(2, PROMPT, 10)[3:]
        assert (await occupant).token_ids == answer_of(1, PROMPT, 10)
        assert (await behind).token_ids == answer_of(3, PROMPT, 10)
        assert [submit.sampling.seed for submit in runner.submits] == [1, 2, 3]


async def test_of_two_resumes_at_once_the_later_goes_on_and_the_other_is_told(
    client: GatewayClient, runner: FakeRunner
) -> None:
    runner.script.step_s = 0.01
    older = client.stub.Generate(named(seed=1, max_tokens=50))
    await until(lambda: runner.live)
    calls = [client.stub.Generate(resuming(named(max_tokens=50), 1, answer_of(1, PROMPT, count))) for count in (2, 3)]
    ends = await asyncio.gather(*(ended(call) for call in (older, *calls)))
    assert ends[0][1] == grpc.StatusCode.ALREADY_EXISTS
    assert sorted(code.name for _, code in ends[1:]) == ["ALREADY_EXISTS", "OK"]
    for count, (answer, code) in zip((2, 3), ends[1:], strict=True):
        if code == grpc.StatusCode.OK:
            assert answer.token_ids == answer_of(1, PROMPT, 50)[count:]
    await until(lambda: not runner.live)
    assert client.admission() == (0, 0)


async def ended(call: "grpc.aio.UnaryStreamCall") -> tuple[Answer, grpc.StatusCode]:
    answer = Answer()
    try:
        async for response in call:
            answer.take(response)
    except grpc.aio.AioRpcError:
        pass
    return answer, await call.code()


@pytest.mark.parametrize("received", [0, 1, 19, 20])
async def test_a_stream_that_has_just_finished_is_resumed_as_any_other(client: GatewayClient, received: int) -> None:
    whole = await client.generate(named(seed=1, max_tokens=20))
    rest = await client.generate(resuming(named(max_tokens=20), 1, whole.token_ids[:received]))
    assert [*whole.token_ids[:received], *rest.token_ids] == whole.token_ids
    assert rest.finish_reason == LENGTH


async def test_a_finished_stream_that_its_client_has_not_read_to_the_end_is_taken_over(
    client: GatewayClient, runner: FakeRunner
) -> None:
    runner.script.tokens_per_step = 20
    older = client.stub.Generate(named(seed=1, max_tokens=20))
    await until(lambda: runner.submits and not runner.live)
    rest = await client.generate(resuming(named(max_tokens=20), 1, answer_of(1, PROMPT, 4)))
    assert rest.token_ids == answer_of(1, PROMPT, 20)[4:]
    older.cancel()


async def test_whoever_has_no_token_gets_the_whole_answer_with_all_that_its_first_message_says(
    client: GatewayClient, runner: FakeRunner
) -> None:
    request = named(max_tokens=20, n=2, echo=True, prompt_logprobs=0)
    request.branch.CopyFrom(Branch(token_ids=SPOKEN[:5]))
    whole = await client.generate(resuming(request, 7))
    assert (whole.seed, whole.usage.resumed_tokens) == (7, 0)
    prompt = [*PROMPT, *SPOKEN[:5]]
    assert whole.all_token_ids() == [answer_of(7, prompt, 20, index) for index in range(2)]
    assert list(whole.first.prompt.token_ids) == prompt
    assert len(whole.first.prompt.logprobs) == len(prompt) - 1
    assert whole.first.branch_text
    # With a token of any candidate it has had the first message.
    rest = await client.generate(resuming(request, 7, [], whole.candidates[1].token_ids[:1]))
    assert not rest.first.HasField("prompt")
    assert not rest.first.HasField("branch_text")
    assert rest.all_token_ids() == [whole.candidates[0].token_ids, whole.candidates[1].token_ids[1:]]
    assert not runner.submits[-1].sampling.HasField("prompt_logprobs")


async def test_a_client_that_knows_no_seed_yet_takes_over_with_its_own_or_any(
    client: GatewayClient, runner: FakeRunner
) -> None:
    runner.script.pauses_at = 0
    older = client.stub.Generate(named(max_tokens=5))
    await until(lambda: runner.live)
    newer = asyncio.create_task(client.generate(resuming(named(max_tokens=5), 0)))
    assert (await failure(older))[0] == grpc.StatusCode.ALREADY_EXISTS
    runner.script.pauses_at = None
    drawn = (await newer).seed
    assert drawn
    own = await client.generate(resuming(named(max_tokens=5, seed=9), 0))
    assert (own.seed, own.token_ids) == (9, answer_of(9, PROMPT, 5))


async def test_a_beam_search_begins_again_and_brings_its_hypotheses_once(
    client: GatewayClient, runner: FakeRunner
) -> None:
    beams = {"width": 2, "intermediate": True}
    request = named(seed=1, max_tokens=20, n=2, beam_search=beams, echo=True)
    runner.script.pauses_at = 5
    call = client.stub.Generate(request)
    shown = await anext(aiter(call))
    assert not shown.deltas
    runner.script.pauses_at = None
    answer = await client.generate(resuming(request, 1, [], []))
    assert answer.all_token_ids() == [answer_of(1, PROMPT, 20, beam) for beam in range(2)]
    assert answer.first.HasField("prompt")
    assert (await failure(call))[0] == grpc.StatusCode.ALREADY_EXISTS


async def test_a_candidate_that_its_client_knows_to_have_ended_is_not_asked_for_again(
    client: GatewayClient, runner: FakeRunner
) -> None:
    request = named(seed=1, n=3, max_tokens=12, logprobs=0, stop=["STOP"])
    resumed = resuming(request, 1, SPOKEN[:4], answer_of(1, PROMPT, 5, 1), [])
    resumed.resume.candidates[0].finish_reason = STOP
    rest = await client.generate(resumed)
    assert set(rest.candidates) == {1, 2}
    assert rest.candidates[1].token_ids == answer_of(1, PROMPT, 12, 1)[5:]
    assert rest.candidates[2].token_ids == answer_of(1, PROMPT, 12, 2)
    assert [candidate.index for candidate in runner.submits[0].candidates] == [1, 2]
    assert (rest.usage.resumed_tokens, rest.usage.completion_tokens) == (9, 28)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("reason", [STOP, LENGTH, 77])
async def test_an_answer_whose_candidates_have_all_ended_brings_usage_at_once(
    client: GatewayClient, runner: FakeRunner, streams: bool, reason: int
) -> None:
    request = named(n=2, echo=True, prompt_logprobs=0, max_tokens=50)
    request.stream = streams
    # The second one's first token has ended it.
    resumed = resuming(request, 7, SPOKEN[:4], [])
    for candidate in resumed.resume.candidates:
        candidate.finish_reason = reason
    answer = await client.generate(resumed)
    assert (answer.num_messages, answer.candidates, answer.seed) == (1, {}, 7)
    assert not answer.first.HasField("prompt")
    assert (answer.usage.prompt_tokens, answer.usage.resumed_tokens, answer.usage.completion_tokens) == (3, 4, 4)
    assert not runner.submits
    assert client.admission() == (0, 0)
    del resumed.resume.candidates[0]
    assert not (await client.generate(resumed)).first.HasField("prompt")


async def test_a_live_stream_whose_client_has_all_but_its_usage_is_taken_over(
    client: GatewayClient, runner: FakeRunner
) -> None:
    runner.script.pauses_at = 5
    older = client.stub.Generate(named(seed=1, max_tokens=20))
    await until(lambda: runner.live)
    resumed = resuming(named(max_tokens=20), 1, SPOKEN[:4])
    resumed.resume.candidates[0].finish_reason = STOP
    assert (await client.generate(resumed)).usage.completion_tokens == 4
    assert (await failure(older))[0] == grpc.StatusCode.ALREADY_EXISTS
    await until(lambda: not runner.live)


async def test_candidates_that_have_ended_say_only_that_again(client: GatewayClient, runner: FakeRunner) -> None:
    ends = {0: 4, 1: 12}

    def token(seed: int, position: int, prompt: Sequence[int]) -> int:
        return END_OF_TURN_ID if position == ends[seed // 1_000_003] else SPOKEN[position]

    runner.script.token = token
    request = named(seed=1, n=2, max_tokens=30, logprobs=0)
    whole = await client.generate(request)
    assert whole.all_token_ids() == [SPOKEN[:4], SPOKEN[:12]]
    rest = await client.generate(resuming(request, 1, SPOKEN[:4], SPOKEN[:7]))
    assert rest.all_token_ids() == [[], SPOKEN[7:12]]
    assert [candidate.finish_reason for candidate in rest.candidates.values()] == [STOP, STOP]
    assert rest.candidates[0].last.cumulative_logprob == 0
    assert rest.candidates[1].last.cumulative_logprob == sum(
        token.logprob for token in whole.candidates[1].logprobs[7:]
    )
    assert whole.candidates[1].text.endswith(rest.candidates[1].text)
