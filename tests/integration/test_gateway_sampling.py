"""The gateway and what a request may ask for besides tokens: every parameter, log-probabilities, beams, branches."""

import math
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagekeeper.common.sockets import RuntimeDir
from pagekeeper.v1 import generate_pb2, runner_pb2, types_pb2
from pagekeeper.v1.generate_pb2 import Branch, GenerateRequest, Resume
from tests.fakes.gateway import GatewayClient, failure, prompt_request, running_gateway, wrong_fields
from tests.fakes.runner import VOCAB_SIZE, FakeRunner, Script, answer_of, logprobs_of, score_of
from tests.fakes.tokenizer import END_OF_TURN_ID, byte_fallback_tokenizer, byte_level_tokenizer, write_model_directory

PROMPT = [5, 6, 7]
STOP, LENGTH = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH
TOKENIZER = byte_level_tokenizer()
SPOKEN = TOKENIZER.encode("The owl 🦉 said: naïve café 東京, and the fox said so too. STOP here. ").ids


def spoken(seed: int, position: int, prompt: Sequence[int]) -> int:
    """A runner that goes on with a speech from where the prompt has left it."""
    begin = len(prompt) - len(PROMPT) if list(prompt[: len(PROMPT)]) == PROMPT else 0
    return SPOKEN[(begin + position) % len(SPOKEN)]


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


async def test_every_parameter_reaches_the_runner(client: GatewayClient, runner: FakeRunner) -> None:
    await client.generate(
        prompt_request(
            PROMPT,
            temperature=0.5,
            top_p=0.9,
            top_k=7,
            min_p=0.25,
            typical_p=0.75,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            repetition_penalty=1.25,
            logit_bias={9: 2.0, 8: -math.inf},
            allowed_token_ids=[10, 11, 12],
            bad_words=["owl"],
            min_tokens=2,
            max_tokens=5,
            seed=1,
            stop_token_ids=[30],
            logprobs=0,
            prompt_logprobs=3,
        )
    )
    words = {tuple(TOKENIZER.encode(text).ids) for text in ("owl", " owl")}
    sampling = runner.submits[-1].sampling
    assert {tuple(word.token_ids) for word in sampling.bad_words} == words
    sampling.ClearField("bad_words")
    assert sampling == runner_pb2.ResolvedSampling(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.25,
        typical_p=0.75,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.25,
        logit_bias={9: 2.0, 8: -math.inf},
        allowed_token_ids=[10, 11, 12],
        min_tokens=2,
        max_tokens=5,
        seed=1,
        stop_token_ids=[END_OF_TURN_ID, 30],
        logprobs=0,
        prompt_logprobs=3,
    )


async def test_what_is_off_is_not_sent(client: GatewayClient, runner: FakeRunner) -> None:
    off = {"typical_p": 1.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    await client.generate(prompt_request(PROMPT, seed=1, max_tokens=1, temperature=0.0, min_tokens=0, **off))
    names = {field.name for field, _ in runner.submits[-1].sampling.ListFields()}
    assert names == {"top_p", "seed", "max_tokens", "stop_token_ids"}


async def test_a_models_own_defaults_are_used(runtime_dir: Path, tmp_path: Path, runner: FakeRunner) -> None:
    config = {"repetition_penalty": 1.05, "typical_p": 0.5, "temperature": 0.6}
    model = write_model_directory(tmp_path / "qwen", generation_config=config)
    async with running_gateway(runtime_dir, model) as client:
        await client.generate(prompt_request(PROMPT, max_tokens=1))
        sampling = runner.submits[-1].sampling
        assert (sampling.repetition_penalty, sampling.typical_p, sampling.temperature) == (1.05, 0.5, 0.6)


async def test_a_bad_word_is_found_where_the_tokenizer_puts_a_space_before_every_text(
    runtime_dir: Path, tmp_path: Path, runner: FakeRunner
) -> None:
    tokenizer = byte_fallback_tokenizer()
    model = write_model_directory(tmp_path / "llama", tokenizer)
    async with running_gateway(runtime_dir, model) as client:
        await client.generate(prompt_request(PROMPT, bad_words=["the"], max_tokens=1))
        found = {tuple(word.token_ids) for word in runner.submits[-1].sampling.bad_words}
        pieces = [(tokenizer.token_to_id("▁the"),), (tokenizer.token_to_id("th"), tokenizer.token_to_id("e"))]
        assert found.issuperset(pieces)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, f"sampling.logit_bias[{VOCAB_SIZE}]"),
        ({"logit_bias": {-1: 1.0}}, "sampling.logit_bias[-1]"),
        ({"logit_bias": {5: math.nan}}, "sampling.logit_bias[5]"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "sampling.stop_token_ids[0]"),
        ({"allowed_token_ids": [5], "logit_bias": {5: -math.inf}}, "sampling.allowed_token_ids"),
    ],
)
async def test_case_20_wrong_bans_and_biases_are_refused_and_a_neighbour_is_not_disturbed(
    client: GatewayClient, runner: FakeRunner, fields: dict[str, Any], field: str
) -> None:
    """Case 20: out-of-vocabulary keys and NaN are INVALID_ARGUMENT and reach no runner."""
    code, status = await failure(client.stub.Generate(prompt_request(PROMPT, **fields)))
    assert (code, wrong_fields(status)) == (grpc.StatusCode.INVALID_ARGUMENT, [field])
    assert (await client.generate(prompt_request(PROMPT, seed=1, max_tokens=5))).token_ids == answer_of(1, PROMPT, 5)
    assert len(runner.submits) == 1


@pytest.mark.parametrize("count", [0, 1, 5])
async def test_case_29_logprobs_come_one_for_each_token(client: GatewayClient, count: int) -> None:
    """Case 29: 0 is the chosen token's only; minus infinity arrives as it is."""
    answer = await client.generate(prompt_request(PROMPT, seed=1, max_tokens=20, n=2, logprobs=count))
    for index, candidate in answer.candidates.items():
        ids = answer_of(1, PROMPT, 20, index)
        assert candidate.logprobs == [logprobs_of(token_id, place, count) for place, token_id in enumerate(ids)]
        assert candidate.last.cumulative_logprob == sum(token.logprob for token in candidate.logprobs)
    assert all(token.top_logprobs[-1:] in ([], [-math.inf]) for token in answer.candidates[0].logprobs)


async def test_case_29_nothing_is_said_of_logprobs_that_nobody_asked_for(client: GatewayClient) -> None:
    """Case 29: none is not 0."""
    answer = await client.generate(prompt_request(PROMPT, seed=1, max_tokens=5))
    assert answer.candidates[0].logprobs == []
    assert not answer.candidates[0].last.HasField("cumulative_logprob")


@pytest.mark.parametrize("stream", [True, False])
async def test_logprobs_stay_with_their_tokens_when_text_is_held_back_and_cut_off(
    client: GatewayClient, runner: FakeRunner, stream: bool
) -> None:
    runner.script.token = spoken
    runner.script.tokens_per_step = 7
    request = prompt_request(PROMPT, seed=1, max_tokens=300, stop=["said so too. STOPPED", "STOP"], logprobs=1)
    request.stream = stream
    answer = await client.generate(request)
    (candidate,) = answer.candidates.values()
    assert candidate.text == TOKENIZER.decode(SPOKEN).split("STOP")[0]
    assert [token.token_id for token in candidate.logprobs] == candidate.token_ids == SPOKEN[: len(candidate.token_ids)]
    assert candidate.last.cumulative_logprob == sum(token.logprob for token in candidate.logprobs)


async def test_logprobs_go_on_over_broken_links(runtime_dir: Path, model: Path, sockets: RuntimeDir) -> None:
    script = Script(breaks_at=[5, 9])
    async with FakeRunner(sockets.runner_socket("a"), script), running_gateway(runtime_dir, model) as client:
        answer = await client.generate(prompt_request(PROMPT, seed=1, max_tokens=30, logprobs=2))
        ids = answer_of(1, PROMPT, 30)
        assert answer.candidates[0].logprobs == [logprobs_of(token_id, place, 2) for place, token_id in enumerate(ids)]


async def test_echo_and_prompt_logprobs_come_with_the_first_message(client: GatewayClient) -> None:
    prompt = TOKENIZER.encode("naïve 🦉").ids
    request = prompt_request(prompt, seed=1, max_tokens=5, echo=True, prompt_logprobs=2)
    for stream in (True, False):
        request.stream = stream
        first = (await client.generate(request)).first
        assert (list(first.prompt.token_ids), first.prompt.text) == (prompt, "naïve 🦉")
        expected = [logprobs_of(token_id, place, 2) for place, token_id in enumerate(prompt) if place]
        assert list(first.prompt.logprobs) == expected
    assert not (await client.generate(prompt_request(prompt, max_tokens=5))).first.HasField("prompt")
    chat = generate_pb2.ChatMessages(messages=[generate_pb2.ChatMessage(role="user", content="hi")])
    answer = await client.generate(GenerateRequest(chat=chat, sampling={"echo": True, "max_tokens": 1}))
    assert answer.first.prompt.text == "user\nhi\nassistant\n"


async def test_the_prompts_logprobs_are_asked_for_once_and_not_by_who_has_them(
    runtime_dir: Path, model: Path, sockets: RuntimeDir
) -> None:
    script = Script(breaks_at=[5])
    async with FakeRunner(sockets.runner_socket("a"), script) as runner, running_gateway(runtime_dir, model) as client:
        request = prompt_request(PROMPT, seed=1, max_tokens=10, prompt_logprobs=0, echo=True)
        answer = await client.generate(request)
        assert answer.token_ids == answer_of(1, PROMPT, 10)
        assert [submit.sampling.HasField("prompt_logprobs") for submit in runner.submits] == [True, False]
        request.resume.CopyFrom(Resume(candidates=[Resume.Candidate(token_ids=answer.token_ids[:3])], seed=1))
        rest = await client.generate(request)
        assert not rest.first.HasField("prompt")
        assert not runner.submits[-1].sampling.HasField("prompt_logprobs")


@pytest.mark.parametrize("fields", [{"logprobs": 0}, {"prompt_logprobs": 0}])
async def test_a_runner_that_leaves_logprobs_out_fails_the_request_alone(
    client: GatewayClient, runner: FakeRunner, fields: dict[str, int]
) -> None:
    runner.script.num_missing_logprobs = 1
    code, _ = await failure(client.stub.Generate(prompt_request(PROMPT, max_tokens=5, **fields)))
    assert code == grpc.StatusCode.INTERNAL
    assert client.admission() == (0, 0)
    assert len((await client.generate(prompt_request(PROMPT, max_tokens=5))).token_ids) == 5


@pytest.mark.parametrize("stream", [True, False])
async def test_a_beam_search_brings_its_hypotheses_at_the_end_best_first(
    client: GatewayClient, runner: FakeRunner, stream: bool
) -> None:
    beams = {"width": 4, "length_penalty": 0.5, "early_stopping": types_pb2.EARLY_STOPPING_NEVER}
    request = prompt_request(PROMPT, seed=1, max_tokens=20, n=3, logprobs=0, beam_search=beams)
    request.stream = stream
    answer = await client.generate(request)
    assert (answer.num_messages, answer.beams) == (1, [])
    assert answer.all_token_ids() == [answer_of(1, PROMPT, 20, beam) for beam in range(3)]
    assert [answer.candidates[beam].last.score for beam in range(3)] == [score_of(beam) for beam in range(3)]
    assert [answer.candidates[beam].text for beam in range(3)] == list(map(TOKENIZER.decode, answer.all_token_ids()))
    assert len(answer.candidates[2].logprobs) == 20
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 60)
    (submit,) = runner.submits
    assert (len(submit.candidates), submit.sampling.temperature) == (3, 0.0)
    assert submit.sampling.beam_search == types_pb2.BeamSearch(**beams)


async def test_a_beam_search_says_its_defaults_to_the_runner(client: GatewayClient, runner: FakeRunner) -> None:
    await client.generate(prompt_request(PROMPT, max_tokens=2, beam_search={"width": 2}))
    beam_search = runner.submits[0].sampling.beam_search
    assert (beam_search.length_penalty, beam_search.early_stopping) == (1.0, types_pb2.EARLY_STOPPING_FALSE)
    assert beam_search.HasField("length_penalty")


async def test_beams_are_shown_as_they_are_after_the_newest_step(client: GatewayClient, runner: FakeRunner) -> None:
    runner.script.token = spoken
    beams = {"width": 2, "intermediate": True}
    answer = await client.generate(prompt_request(PROMPT, seed=1, max_tokens=20, n=2, beam_search=beams))
    assert answer.beams
    lengths = [len(shown[0].token_ids) for shown in answer.beams]
    assert lengths == sorted(set(lengths))
    for shown in answer.beams:
        assert [beam.score for beam in shown] == [score_of(0), score_of(1)]
        for beam in shown:
            assert beam.text == TOKENIZER.decode(beam.token_ids)
    assert answer.num_messages == len(answer.beams) + 1
    assert answer.candidates[0].token_ids == SPOKEN[:20]


async def test_a_beam_search_starts_again_when_its_runner_is_lost(
    runtime_dir: Path, model: Path, sockets: RuntimeDir
) -> None:
    script = Script(breaks_at=[5, 9])
    async with FakeRunner(sockets.runner_socket("a"), script) as runner, running_gateway(runtime_dir, model) as client:
        beams = {"width": 2, "intermediate": True}
        answer = await client.generate(prompt_request(PROMPT, seed=1, max_tokens=20, n=2, beam_search=beams))
        assert answer.all_token_ids() == [answer_of(1, PROMPT, 20, beam) for beam in range(2)]
        assert [[len(c.generated_token_ids) for c in submit.candidates] for submit in runner.submits] == [[0, 0]] * 3


@pytest.mark.parametrize("position", range(len(SPOKEN)))
async def test_a_branch_goes_on_in_the_middle_of_a_word_or_a_character(
    client: GatewayClient, runner: FakeRunner, position: int
) -> None:
    runner.script.token = spoken
    request = prompt_request(PROMPT, seed=1, max_tokens=len(SPOKEN) - position, n=2, echo=True)
    request.branch.CopyFrom(Branch(token_ids=SPOKEN[:position], request_id="long gone"))
    answer = await client.generate(request)
    assert answer.first.HasField("branch_text")
    for candidate in answer.candidates.values():
        assert candidate.first_position == 0
        assert answer.first.branch_text + candidate.text == TOKENIZER.decode(SPOKEN)
    (submit,) = runner.submits
    assert list(submit.prompt_token_ids) == list(answer.first.prompt.token_ids) == PROMPT + SPOKEN[:position]
    assert answer.usage.prompt_tokens == 3 + position
    assert answer.usage.completion_tokens == 2 * (len(SPOKEN) - position)


async def test_a_branch_resumes_behind_its_own_tokens(client: GatewayClient, runner: FakeRunner) -> None:
    runner.script.token = spoken
    request = prompt_request(PROMPT, seed=1, max_tokens=30)
    request.branch.token_ids.extend(SPOKEN[:9])
    whole = await client.generate(request)
    request.resume.CopyFrom(Resume(candidates=[Resume.Candidate(token_ids=whole.token_ids[:6])], seed=1))
    rest = await client.generate(request)
    assert rest.first_position == 6
    assert whole.text.endswith(rest.text)
    assert list(runner.submits[-1].candidates[0].generated_token_ids) == SPOKEN[9:15]
    assert not rest.first.HasField("branch_text")


async def test_stop_strings_of_a_branch_begin_behind_its_tokens(client: GatewayClient, runner: FakeRunner) -> None:
    runner.script.token = spoken
    request = prompt_request(PROMPT, seed=1, max_tokens=200, stop=["The owl"], include_stop_str=True)
    request.branch.token_ids.extend(SPOKEN[:2])
    answer = await client.generate(request)
    text = TOKENIZER.decode(SPOKEN)
    assert (answer.first.branch_text + answer.text, answer.finish_reason) == (text + "The owl", STOP)


async def test_case_14_a_branch_that_leaves_no_room_is_refused(client: GatewayClient) -> None:
    """Case 14: the boundary counts prompt and branch together, and the error names the branch."""
    request = prompt_request([5] * 500)
    request.branch.token_ids.extend([6] * 12)
    code, status = await failure(client.stub.Generate(request))
    assert (code, wrong_fields(status)) == (grpc.StatusCode.INVALID_ARGUMENT, ["branch.token_ids"])
    assert "at most 511" in status.message
