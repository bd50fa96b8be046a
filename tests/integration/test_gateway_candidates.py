"""The gateway and requests with several candidates: each has its own text, its own end and its own way back."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import pytest

from pagekeeper.common.sockets import RuntimeDir
from pagekeeper.v1 import types_pb2
from pagekeeper.v1.generate_pb2 import Resume
from tests.fakes.gateway import (
    Answer,
    GatewayClient,
    error_info,
    failure,
    prompt_request,
    running_gateway,
    until,
    wrong_fields,
)
from tests.fakes.runner import FakeRunner, Script, answer_of, seed_of
from tests.fakes.tokenizer import END_OF_TURN_ID, byte_level_tokenizer, write_model_directory

PROMPT = [5, 6, 7]
STOP, LENGTH = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH
TOKENIZER = byte_level_tokenizer()
# The same words, of which candidate 1 says more before it comes to the stop string.
SPEECHES = [TOKENIZER.encode(f"the owl {'🦉 naïve ' * index}said STOP and went on. ").ids for index in range(4)]


def speeches(seed: int, position: int, prompt: Sequence[int]) -> int:
    """A runner whose candidates recite, each its own speech over and over."""
    index = next(index for index in range(4) if seed == seed_of(1, index))
    return SPEECHES[index][position % len(SPEECHES[index])]


def text_of(index: int) -> str:
    return TOKENIZER.decode(SPEECHES[index])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model_directory(tmp_path / "tiny")


@pytest.fixture
def sockets(runtime_dir: Path) -> RuntimeDir:
    return RuntimeDir(runtime_dir)


@pytest.fixture
async def runner(sockets: RuntimeDir) -> AsyncIterator[FakeRunner]:
    async with FakeRunner(sockets.runner_socket("a")) as fake:
        yield fake


@pytest.fixture
async def client(runtime_dir: Path, model: Path, runner: FakeRunner) -> AsyncIterator[GatewayClient]:
    async with running_gateway(runtime_dir, model) as running:
        yield running


def answers_of(num_tokens: int, n: int) -> list[list[int]]:
    return [answer_of(1, PROMPT, num_tokens, candidate) for candidate in range(n)]


async def test_every_candidate_streams_its_own_tokens_once_and_the_prompt_is_counted_once(
    client: GatewayClient, runner: FakeRunner
) -> None:
    answer = await client.generate(prompt_request(PROMPT, seed=1, max_tokens=40, n=4))
    assert answer.all_token_ids() == answers_of(40, 4)
    assert {candidate.finish_reason for candidate in answer.candidates.values()} == {LENGTH}
    assert answer.usage == types_pb2.Usage(prompt_tokens=3, cached_tokens=16, completion_tokens=160)
    (submit,) = runner.submits
    assert [candidate.index for candidate in submit.candidates] == [0, 1, 2, 3]


async def test_one_message_holds_what_the_streams_of_all_candidates_join_to(
    client: GatewayClient, runner: FakeRunner
) -> None:
    runner.script.token = speeches
    request = prompt_request(PROMPT, seed=1, max_tokens=60, n=4, stop=["STOP"])
    streamed = await client.generate(request)
    request.stream = False
    whole = await client.generate(request)
    assert whole.num_messages == 1
    for index, candidate in whole.candidates.items():
        other = streamed.candidates[index]
        assert (candidate.token_ids, candidate.text) == (other.token_ids, other.text)
    assert whole.usage == streamed.usage


async def test_a_stop_string_ends_its_own_candidate_and_the_runner_is_told(
    client: GatewayClient, runner: FakeRunner
) -> None:
    runner.script.token = speeches
    runner.script.step_s = 0.005
    answer = await client.generate(prompt_request(PROMPT, seed=1, max_tokens=200, n=4, stop=["STOP"]))
    assert [answer.candidates[index].text for index in range(4)] == [text_of(i).split("STOP")[0] for i in range(4)]
    assert {candidate.finish_reason for candidate in answer.candidates.values()} == {STOP}
    ids = answer.all_token_ids()
    assert ids == [speech[: len(found)] for speech, found in zip(SPEECHES, ids, strict=True)]
    await until(lambda: not runner.live)
    request = runner.submits[0].request
    assert (request, 0) in runner.cancelled_candidates
    await until(lambda: runner.cancels == [request])


async def test_a_stop_token_ends_its_own_candidate(client: GatewayClient, runner: FakeRunner) -> None:
    ends = {seed_of(1, 0): 3, seed_of(1, 1): 9}
    runner.script.token = lambda seed, position, prompt: END_OF_TURN_ID if position == ends[seed] else 10
    answer = await client.generate(prompt_request(PROMPT, seed=1, n=2))
    assert answer.all_token_ids() == [[10] * 3, [10] * 9]
    assert not runner.cancels


async def test_min_tokens_holds_for_stop_strings_and_for_stop_tokens(client: GatewayClient, runner: FakeRunner) -> None:
    runner.script.token = speeches
    once = len(SPEECHES[0])
    request = prompt_request(PROMPT, seed=1, max_tokens=100, stop=["STOP"], min_tokens=once)
    answer = await client.generate(request)
    assert answer.text == text_of(0) + text_of(0).split("STOP")[0]
    assert (runner.submits[0].sampling.min_tokens, answer.finish_reason) == (once, STOP)
    runner.script.token = lambda seed, position, prompt: END_OF_TURN_ID
    answer = await client.generate(prompt_request(PROMPT, min_tokens=5))
    assert answer.token_ids == [END_OF_TURN_ID] * 5


async def test_an_included_stop_string_is_the_end_of_the_text(client: GatewayClient, runner: FakeRunner) -> None:
    runner.script.token = speeches
    for stream in (True, False):
        request = prompt_request(PROMPT, seed=1, max_tokens=100, n=2, stop=["STOP"], include_stop_str=True)
        request.stream = stream
        answer = await client.generate(request)
        assert [answer.candidates[i].text for i in range(2)] == [text_of(i).split("STOP")[0] + "STOP" for i in range(2)]


async def test_candidates_go_on_over_broken_links_each_behind_its_own_tokens(
    runtime_dir: Path, model: Path, sockets: RuntimeDir
) -> None:
    ends = {seed_of(1, 0): 4, seed_of(1, 1): 30, seed_of(1, 2): 20}

    def token(seed: int, position: int, prompt: Sequence[int]) -> int:
        return END_OF_TURN_ID if position == ends[seed] else 3 + (seed + position) % 200

    script = Script(breaks_at=[2, 9, 25], token=token)
    async with FakeRunner(sockets.runner_socket("a"), script) as runner, running_gateway(runtime_dir, model) as client:
        answer = await client.generate(prompt_request(PROMPT, seed=1, n=3))
        assert answer.all_token_ids() == [[token(seed, place, PROMPT) for place in range(ends[seed])] for seed in ends]
        known = [[(c.index, len(c.generated_token_ids)) for c in submit.candidates] for submit in runner.submits]
        assert known == [
            [(0, 0), (1, 0), (2, 0)],
            [(0, 2), (1, 2), (2, 2)],
            [(1, 9), (2, 9)],
            [(1, 25)],
        ]
        assert [submit.attempt for submit in runner.submits] == [1, 2, 3, 4]
        assert answer.usage.completion_tokens == 54


async def test_a_candidate_that_a_stop_string_ended_is_not_submitted_again(
    runtime_dir: Path, model: Path, sockets: RuntimeDir
) -> None:
    behind_the_first_stop = len(TOKENIZER.encode(text_of(0).split("STOP")[0]).ids) + 6
    script = Script(breaks_at=[behind_the_first_stop], token=speeches, step_s=0.005)
    async with FakeRunner(sockets.runner_socket("a"), script) as runner, running_gateway(runtime_dir, model) as client:
        answer = await client.generate(prompt_request(PROMPT, seed=1, max_tokens=200, n=4, stop=["STOP"]))
        assert [answer.candidates[i].text for i in range(4)] == [text_of(i).split("STOP")[0] for i in range(4)]
        again = {candidate.index for candidate in runner.submits[1].candidates}
        assert 0 not in again
        assert 3 in again


async def test_candidates_move_to_the_next_runner_from_different_positions(
    runtime_dir: Path, model: Path, sockets: RuntimeDir
) -> None:
    async with running_gateway(runtime_dir, model) as client:
        request = prompt_request(PROMPT, seed=1, max_tokens=50, n=3)
        for index, received in enumerate((0, 7, 20)):
            request.resume.candidates.add(index=index, token_ids=answer_of(1, PROMPT, received, index))
        request.resume.seed = 1
        async with FakeRunner(sockets.runner_socket("a"), Script(step_s=0.01)) as first:
            call = asyncio.create_task(client.generate(request))
            await until(lambda: first.live)
            await asyncio.sleep(0.05)
        async with FakeRunner(sockets.runner_socket("b")) as second:
            answer = await call
        lengths = [len(candidate.generated_token_ids) for candidate in second.submits[0].candidates]
        assert lengths[1] - lengths[0] == 7
        assert lengths[2] - lengths[0] == 20
        whole = answers_of(50, 3)
        assert answer.all_token_ids() == [ids[received:] for ids, received in zip(whole, (0, 7, 20), strict=True)]
        assert [answer.candidates[index].first_position for index in range(3)] == [0, 7, 20]
        assert (answer.usage.resumed_tokens, answer.usage.completion_tokens) == (27, 150)


async def test_a_resumed_request_submits_only_the_candidates_that_have_not_ended(
    client: GatewayClient, runner: FakeRunner
) -> None:
    runner.script.token = speeches
    request = prompt_request(PROMPT, seed=1, max_tokens=50, n=4, stop=["STOP"])
    whole = await client.generate(request)
    # The first has ended by its stop string, the second by a stop token, the third is on its way.
    received = [whole.candidates[0].token_ids, [10, 11, END_OF_TURN_ID], whole.candidates[2].token_ids[:5]]
    request.resume.CopyFrom(Resume(seed=1))
    for index, token_ids in enumerate(received):
        request.resume.candidates.add(index=index, token_ids=token_ids)
    rest = await client.generate(request)
    assert [candidate.index for candidate in runner.submits[-1].candidates] == [2, 3]
    assert [candidate.finish_reason for candidate in rest.candidates.values()] == [STOP] * 4
    assert [len(rest.candidates[index].token_ids) for index in range(2)] == [0, 0]
    assert [rest.candidates[index].text for index in range(2)] == ["", ""]
    assert received[2] + rest.candidates[2].token_ids == whole.candidates[2].token_ids
    assert rest.candidates[3].token_ids == whole.candidates[3].token_ids


async def test_a_request_waits_for_room_for_all_its_candidates_and_beams(
    runtime_dir: Path, model: Path, runner: FakeRunner
) -> None:
    runner.script.pauses_at = 2
    async with running_gateway(runtime_dir, model, max_concurrent=4) as client:
        requests = [
            prompt_request(PROMPT, max_tokens=5, n=3),
            prompt_request(PROMPT, max_tokens=5, beam_search={"width": 4}),
            prompt_request(PROMPT, max_tokens=5),
        ]
        calls = []
        for number, request in enumerate(requests):
            calls.append(asyncio.create_task(client.generate(request)))
            await until(lambda: client.admission() == (1, number))  # noqa: B023 - awaited here
        runner.script.pauses_at = None
        await asyncio.gather(*calls)
        assert [len(submit.candidates) for submit in runner.submits] == [3, 1, 1]
        assert client.admission() == (0, 0)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_takes_all_candidates_with_it(
    client: GatewayClient, runner: FakeRunner, stream: bool
) -> None:
    request = prompt_request(PROMPT, max_tokens=400, n=4)
    request.stream = stream
    runner.script.step_s = 0.01
    call = client.stub.Generate(request)
    await until(lambda: runner.live)
    call.cancel()
    await until(lambda: runner.cancels == [runner.submits[0].request])
    await until(lambda: not runner.live and client.admission() == (0, 0))


async def test_case_28_slow_readers_lose_nothing_of_any_candidate(client: GatewayClient, runner: FakeRunner) -> None:
    """Case 28: 50 ms a read: positions contiguous, the join is the final text, also where several grow at once."""
    runner.script.token = speeches
    runner.script.step_s = 0.005
    request = prompt_request(PROMPT, seed=1, max_tokens=60, n=4, logprobs=2)
    answers: list[Answer] = await asyncio.gather(*(client.generate(request, read_s=0.05) for _ in range(16)))
    for answer in answers:
        for index, candidate in answer.candidates.items():
            assert candidate.token_ids == (SPEECHES[index] * 60)[:60]
            assert candidate.text == TOKENIZER.decode(candidate.token_ids)
            assert [token.token_id for token in candidate.logprobs] == candidate.token_ids


async def test_a_lost_request_says_how_many_tokens_of_all_candidates_came(
    runtime_dir: Path, model: Path, sockets: RuntimeDir
) -> None:
    async with running_gateway(runtime_dir, model, runner_wait_s=0.3) as client:
        received = Answer()
        async with FakeRunner(sockets.runner_socket("a"), Script(step_s=0.01)):
            await client.until_serving()
            responses = aiter(client.stub.Generate(prompt_request(PROMPT, seed=1, max_tokens=400, n=3)))
            received.take(await anext(responses))

        async def rest() -> None:
            async for response in responses:
                received.take(response)

        code, status = await failure(rest())
        assert code == grpc.StatusCode.UNAVAILABLE
        emitted = sum(map(len, received.all_token_ids()))
        assert error_info(status).metadata["tokens_emitted"] == str(emitted)


async def test_case_25_the_servers_caps_are_configured_and_named(
    runtime_dir: Path, model: Path, runner: FakeRunner
) -> None:
    """Case 25: n, beam width, logprobs and their memory are refused at admission, and nothing reaches a runner."""
    caps = {"max_n": 2, "max_beam_width": 3, "max_logprobs": 1, "max_logprob_values": 100}
    async with running_gateway(runtime_dir, model, **caps) as client:
        for fields, field in [
            ({"n": 3}, "sampling.n"),
            ({"beam_search": {"width": 4}}, "sampling.beam_search.width"),
            ({"logprobs": 2}, "sampling.logprobs"),
            ({"prompt_logprobs": 2}, "sampling.prompt_logprobs"),
            ({"logprobs": 1, "max_tokens": 34}, "sampling.logprobs"),
        ]:
            code, status = await failure(client.stub.Generate(prompt_request(PROMPT, **fields)))
            assert (code, wrong_fields(status)) == (grpc.StatusCode.INVALID_ARGUMENT, [field])
        assert not runner.submits
        await client.generate(prompt_request(PROMPT, logprobs=1, max_tokens=33))
