"""The runner as a gateway sees it: one stream over a Unix socket, with a real engine behind it."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from kernels.select import select_kernels
from model_runner.device import CpuDevice
from model_runner.dispatch import RunnerInfo
from model_runner.engine import Engine, StepCost
from model_runner.model.load import LoadedModel
from model_runner.scheduler import Scheduler, SchedulerLimits
from model_runner.service import RunnerService
from model_runner.submission import RequestLimits
from pagekeeper.v1 import runner_pb2, runner_pb2_grpc, types_pb2
from tests.fakes.engine import load_tiny
from tests.fakes.local_cache import LocalPool
from tests.models import write_tiny_model

BLOCK_SIZE = 8
NUM_BLOCKS = 64
TIMEOUT_S = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@dataclass
class Runner:
    service: RunnerService
    pool: LocalPool
    target: str


class Gateway:
    """One gateway's stream; collects tokens by (request, attempt)."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call = runner_pb2_grpc.RunnerServiceStub(channel).Serve()
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.ended: dict[tuple[int, int], runner_pb2.SequenceOutput] = {}
        self.step_messages = 0
        self.num_drains = 0
        self.usages: dict[tuple[int, int], list[types_pb2.Usage]] = {}

    async def read(self) -> runner_pb2.ServeResponse:
        message = await asyncio.wait_for(self.call.read(), TIMEOUT_S)
        assert message is not grpc.aio.EOF
        self.num_drains += message.HasField("draining")
        if message.WhichOneof("message") == "step":
            self.step_messages += 1
            for output in message.step.outputs:
                key = (output.request, output.attempt)
                tokens = self.tokens.setdefault(key, [])
                if output.token_ids:
                    assert output.position == len(tokens)
                tokens.extend(output.token_ids)
                if output.HasField("usage"):
                    self.usages.setdefault(key, []).append(output.usage)
                if output.finish_reason or output.HasField("refusal"):
                    self.ended[key] = output
        return message

    async def submit(self, request: int, prompt: list[int], attempt: int = 1, max_tokens: int = 8, **fields) -> None:  # noqa: ANN003 - fields of Submit
        sampling = runner_pb2.ResolvedSampling(top_p=1.0, max_tokens=max_tokens)
        submit = runner_pb2.Submit(
            request=request, attempt=attempt, tenant="t", prompt_token_ids=prompt, sampling=sampling, **fields
        )
        await self.call.write(runner_pb2.ServeRequest(submit=submit))

    async def cancel(self, request: int, *candidates: int) -> None:
        cancel = runner_pb2.Cancel(request=request, candidates=candidates)
        await self.call.write(runner_pb2.ServeRequest(cancel=cancel))

    async def end_of(self, request: int, attempt: int = 1) -> runner_pb2.SequenceOutput:
        while (request, attempt) not in self.ended:
            await self.read()
        return self.ended[(request, attempt)]


@pytest.fixture
async def runner(model: LoadedModel, runtime_dir: Path) -> AsyncIterator[Runner]:
    loop = asyncio.get_running_loop()
    pool = LocalPool(NUM_BLOCKS, model.kv_layout(BLOCK_SIZE))
    limits = RequestLimits(model.config.vocab_size, 256, BLOCK_SIZE, NUM_BLOCKS - 2, 16)
    service = RunnerService(RunnerInfo("r-1", "tiny", limits, runner_pb2.ROLE_PREFILL, standby=True))
    engine = Engine(
        Scheduler(SchedulerLimits(BLOCK_SIZE, 64, 16)),
        CpuDevice(model.decoder, select_kernels("cpu"), pool.layout),
        pool.attach,
        lambda step, outputs: loop.call_soon_threadsafe(service.deliver, step, outputs),
        StepCost(60.0, 1.0),
    )
    service.start(engine)
    ended = loop.run_in_executor(None, engine.run)
    server = grpc.aio.server()
    runner_pb2_grpc.add_RunnerServiceServicer_to_server(service, server)
    target = f"unix:{runtime_dir / 'runner-0.sock'}"
    server.add_insecure_port(target)
    await server.start()
    yield Runner(service, pool, target)
    await server.stop(None)
    engine.stop()
    await ended


@pytest.fixture
async def gateway(runner: Runner) -> AsyncIterator[Gateway]:
    async with grpc.aio.insecure_channel(runner.target) as channel:
        gateway = Gateway(channel)
        hello = (await gateway.read()).hello
        assert (hello.runner_id, hello.max_context_length, hello.block_size) == ("r-1", 256, BLOCK_SIZE)
        assert (hello.role, hello.standby) == (runner_pb2.ROLE_PREFILL, True)
        yield gateway


async def all_blocks_free(runner: Runner) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while runner.pool.policy.stats().pool.free_blocks != NUM_BLOCKS - 1:
            await asyncio.sleep(0.01)
    assert runner.pool.policy.check_integrity() == []


async def test_a_request_is_answered_token_by_token_and_ends_with_its_usage(gateway: Gateway) -> None:
    await gateway.submit(1, [5] * 20)
    end = await gateway.end_of(1)
    assert len(gateway.tokens[(1, 1)]) == 8
    assert end.finish_reason == types_pb2.FINISH_REASON_LENGTH
    assert (end.usage.prompt_tokens, end.usage.completion_tokens, end.usage.recomputed_tokens) == (20, 8, 0)
    assert [usage.completion_tokens for usage in gateway.usages[(1, 1)]] == [1, 8]


async def test_a_step_sends_one_message_whatever_the_number_of_sequences(gateway: Gateway) -> None:
    for request in range(1, 9):
        await gateway.submit(request, [request + 3] * 5, max_tokens=30)
    for request in range(1, 9):
        await gateway.end_of(request)
    assert sum(len(tokens) for tokens in gateway.tokens.values()) == 240
    assert gateway.step_messages < 120


async def test_generated_tokens_are_continued_and_not_sent_again(gateway: Gateway) -> None:
    await gateway.submit(1, [7] * 20)
    await gateway.end_of(1)
    whole = gateway.tokens[(1, 1)]
    gateway.tokens[(2, 1)] = whole[:3]
    candidate = runner_pb2.Submit.Candidate(generated_token_ids=whole[:3])
    await gateway.submit(2, [7] * 20, candidates=[candidate])
    end = await gateway.end_of(2)
    assert gateway.tokens[(2, 1)] == whole
    assert (end.usage.resumed_tokens, end.usage.completion_tokens) == (3, 8)


async def test_a_newer_attempt_ends_the_older_one(gateway: Gateway) -> None:
    await gateway.submit(1, [9] * 10, attempt=1, max_tokens=200)
    while len(gateway.tokens.get((1, 1), [])) < 3:
        await gateway.read()
    await gateway.submit(1, [9] * 10, attempt=2, max_tokens=12)
    await gateway.end_of(1, attempt=2)
    assert (1, 1) not in gateway.ended
    assert gateway.tokens[(1, 2)][:3] == gateway.tokens[(1, 1)][:3]


async def test_a_cancelled_request_gives_its_blocks_back(gateway: Gateway, runner: Runner) -> None:
    await gateway.submit(1, [9] * 10, max_tokens=200)
    await gateway.read()
    await gateway.cancel(1)
    await gateway.cancel(1)
    await gateway.cancel(77)
    await all_blocks_free(runner)


async def test_the_end_of_the_stream_cancels_its_sequences_and_no_other(runner: Runner, gateway: Gateway) -> None:
    await gateway.submit(1, [4] * 10, max_tokens=60)
    async with grpc.aio.insecure_channel(runner.target) as channel:
        other = Gateway(channel)
        await other.read()
        await other.submit(1, [6] * 10, max_tokens=240)
        while len(other.tokens.get((1, 1), [])) < 2:
            await other.read()
    await gateway.end_of(1)
    assert len(gateway.tokens[(1, 1)]) == 60
    await all_blocks_free(runner)


async def test_a_pong_tells_what_the_engine_does(gateway: Gateway) -> None:
    for nonce in itertools.count(3):
        await gateway.call.write(runner_pb2.ServeRequest(ping=runner_pb2.Ping(nonce=nonce)))
        while (message := await gateway.read()).WhichOneof("message") != "pong":
            pass
        assert message.pong.nonce == nonce
        # An idle engine talks to its manager now and then.
        if message.pong.engine.state != runner_pb2.EngineReport.STATE_WAITING_FOR_MANAGER:
            break
    assert message.pong.engine.state == runner_pb2.EngineReport.STATE_IDLE


@pytest.mark.parametrize(
    ("prompt", "generated", "field"),
    [
        ([], [], "prompt"),
        ([5] * 256, [], "prompt"),
        ([5] * 250, [5] * 6, "prompt"),
        ([5], [5] * 8, "sampling.max_tokens"),
        ([384], [], "token_ids"),
    ],
)
async def test_what_can_never_be_served_is_refused_at_the_door(
    gateway: Gateway, prompt: list[int], generated: list[int], field: str
) -> None:
    await gateway.submit(1, prompt, candidates=[runner_pb2.Submit.Candidate(generated_token_ids=generated)])
    refusal = (await gateway.end_of(1)).refusal
    assert (refusal.code, refusal.field) == (runner_pb2.Refusal.CODE_INVALID, field)
    await gateway.submit(2, [5] * 247, max_tokens=8)
    assert (await gateway.end_of(2)).usage.completion_tokens == 8


async def test_case_14_the_advertised_limit_is_the_enforced_one(gateway: Gateway) -> None:
    """Case 14: prompts of limit - 1, limit, limit + 1: one boundary, stated in the error."""
    for request, length in enumerate((255, 256, 257), start=1):
        await gateway.submit(request, [5] * length)
        await gateway.end_of(request)
    assert gateway.ended[(1, 1)].usage.completion_tokens == 1
    assert "at most 255 tokens" in gateway.ended[(2, 1)].refusal.detail
    assert "at most 255 tokens" in gateway.ended[(3, 1)].refusal.detail


async def test_a_draining_runner_says_so_finishes_what_it_has_and_takes_nothing_new(
    runner: Runner, gateway: Gateway
) -> None:
    await gateway.submit(1, [4] * 10, max_tokens=240)
    await gateway.read()
    drained = asyncio.create_task(runner.service.drain(grace_s=TIMEOUT_S))
    await asyncio.sleep(0)
    await gateway.submit(2, [4] * 10)
    assert (await gateway.end_of(2)).refusal.code == runner_pb2.Refusal.CODE_DRAINING
    await gateway.end_of(1)
    assert gateway.num_drains == 1
    assert len(gateway.tokens[(1, 1)]) == 240
    await asyncio.wait_for(drained, TIMEOUT_S)
    assert await gateway.call.read() is grpc.aio.EOF
    await all_blocks_free(runner)


async def test_what_a_gateway_moves_away_leaves_nothing_and_is_not_waited_for(runner: Runner, gateway: Gateway) -> None:
    await gateway.submit(1, [4] * 10, max_tokens=240)
    await gateway.submit(2, [6] * 30, max_tokens=220)
    while not gateway.tokens.get((2, 1)):
        await gateway.read()
    drained = asyncio.create_task(runner.service.drain(grace_s=TIMEOUT_S))
    while not gateway.num_drains:
        await gateway.read()
    await gateway.cancel(1)
    await gateway.submit(2, [6] * 30, attempt=2)  # refused, and the older attempt is over all the same
    assert (await gateway.end_of(2, attempt=2)).refusal.code == runner_pb2.Refusal.CODE_DRAINING
    await asyncio.wait_for(drained, TIMEOUT_S)
    assert not {(1, 1), (2, 1)} & gateway.ended.keys()
    await all_blocks_free(runner)


async def test_a_gateway_that_comes_while_the_runner_drains_is_told(runner: Runner, gateway: Gateway) -> None:
    await gateway.submit(1, [4] * 10, max_tokens=240)
    await gateway.read()
    drained = asyncio.create_task(runner.service.drain(grace_s=TIMEOUT_S))
    async with grpc.aio.insecure_channel(runner.target) as channel:
        late = Gateway(channel)
        assert [(await late.read()).WhichOneof("message") for _ in range(2)] == ["hello", "draining"]
        await gateway.cancel(1)
        await drained
        assert await late.call.read() is grpc.aio.EOF
        after = Gateway(channel)
        assert [(await after.read()).WhichOneof("message") for _ in range(2)] == ["hello", "draining"]
        assert await after.call.read() is grpc.aio.EOF


async def test_a_successor_ends_the_grace(runner: Runner, gateway: Gateway) -> None:
    await gateway.submit(1, [4] * 10, max_tokens=240)
    await gateway.read()
    drained = asyncio.create_task(runner.service.drain(grace_s=100 * TIMEOUT_S))
    async with grpc.aio.insecure_channel(runner.target) as channel:
        await runner_pb2_grpc.RunnerServiceStub(channel).Retire(runner_pb2.RetireRequest())
    assert runner.service.retired.is_set()
    await asyncio.wait_for(drained, TIMEOUT_S)
    while await gateway.call.read() is not grpc.aio.EOF:
        pass
    await all_blocks_free(runner)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {384: 1.0}),
        ("allowed_token_ids", [5, 384]),
        ("bad_words", [{"token_ids": [5, 384]}]),
        ("stop_token_ids", [384]),
    ],
)
async def test_case_20_a_token_outside_the_vocabulary_is_refused_by_name(
    gateway: Gateway, field: str, value: object
) -> None:
    """Case 20: out-of-vocabulary stop token ids or logit-bias keys."""
    sampling = runner_pb2.ResolvedSampling(top_p=1.0, max_tokens=8, min_tokens=1, **{field: value})
    submit = runner_pb2.Submit(request=1, attempt=1, tenant="t", prompt_token_ids=[5], sampling=sampling)
    await gateway.call.write(runner_pb2.ServeRequest(submit=submit))
    refusal = (await gateway.end_of(1)).refusal
    assert (refusal.code, refusal.field) == (runner_pb2.Refusal.CODE_INVALID, f"sampling.{field}")


@pytest.mark.parametrize("beam_search", [None, types_pb2.BeamSearch(width=2, length_penalty=1.0, early_stopping=1)])
async def test_logprobs_come_with_every_token_and_those_of_the_prompt_once(
    gateway: Gateway, beam_search: types_pb2.BeamSearch | None
) -> None:
    prompt = list(range(3, 90))  # more than one chunk
    candidates = [runner_pb2.Submit.Candidate(index=index) for index in (0, 1)]
    sampling = runner_pb2.ResolvedSampling(
        top_p=1.0, max_tokens=3, logprobs=2, prompt_logprobs=1, beam_search=beam_search
    )
    submit = runner_pb2.Submit(
        request=1, attempt=1, tenant="t", prompt_token_ids=prompt, candidates=candidates, sampling=sampling
    )
    await gateway.call.write(runner_pb2.ServeRequest(submit=submit))
    told: dict[int, list[types_pb2.TokenLogprobs]] = {0: [], 1: []}
    token_ids: dict[int, list[int]] = {0: [], 1: []}
    prompts = list[runner_pb2.PromptOutput]()
    while any(len(tokens) < 3 for tokens in token_ids.values()):
        step = (await gateway.call.read()).step
        prompts += step.prompts
        assert prompts
        for output in step.outputs:
            told[output.candidate] += output.logprobs
            token_ids[output.candidate] += output.token_ids
    for candidate in (0, 1):
        assert [token.token_id for token in told[candidate]] == token_ids[candidate]
        assert all(len(token.top_token_ids) == len(token.top_logprobs) == 2 for token in told[candidate])
    assert [token.token_id for token in prompts[0].logprobs] == prompt[1:]
    assert all(len(token.top_logprobs) == 1 for token in prompts[0].logprobs)
    assert len(prompts) == 1


async def test_one_candidate_is_cancelled_and_the_other_goes_on(runner: Runner, gateway: Gateway) -> None:
    candidates = [runner_pb2.Submit.Candidate(index=index) for index in (0, 1)]
    submit = runner_pb2.Submit(
        request=1,
        attempt=1,
        tenant="t",
        prompt_token_ids=[5] * 20,
        candidates=candidates,
        sampling=runner_pb2.ResolvedSampling(top_p=1.0, max_tokens=100),
    )
    await gateway.call.write(runner_pb2.ServeRequest(submit=submit))
    await gateway.cancel(1, 0)
    end = await asyncio.wait_for(_end_of_candidate(gateway, 1), TIMEOUT_S)
    assert end.finish_reason == types_pb2.FINISH_REASON_LENGTH
    await all_blocks_free(runner)


async def test_candidates_all_count_what_was_cached_and_one_what_is_computed_again(gateway: Gateway) -> None:
    prompt = [5] * 20
    await gateway.submit(1, prompt, max_tokens=4)
    await gateway.end_of(1)
    generated = gateway.tokens[(1, 1)]
    candidates = [
        runner_pb2.Submit.Candidate(index=index, generated_token_ids=generated[:count])
        for index, count in ((1, 3), (3, 2))
    ]
    sampling = runner_pb2.ResolvedSampling(top_p=1.0, max_tokens=4)
    submit = runner_pb2.Submit(
        request=2, attempt=1, tenant="t", prompt_token_ids=prompt, candidates=candidates, sampling=sampling
    )
    await gateway.call.write(runner_pb2.ServeRequest(submit=submit))
    ends = {output.candidate: output for output in await read_until_ended(gateway, {1, 3})}
    assert {index: end.usage.resumed_tokens for index, end in ends.items() if end.finish_reason} == {1: 3, 3: 2}
    assert all(end.usage.cached_tokens == 20 and end.usage.completion_tokens == 4 for end in ends.values())
    assert sum(end.usage.recomputed_tokens for end in ends.values()) <= BLOCK_SIZE


def beam_search(
    num_hypotheses: int, max_tokens: int = 8, stop: range = range(3, 40), **fields: object
) -> runner_pb2.ServeRequest:
    wanted = {"length_penalty": 1.0, "early_stopping": types_pb2.EARLY_STOPPING_FALSE} | fields
    sampling = runner_pb2.ResolvedSampling(
        top_p=1.0, max_tokens=max_tokens, beam_search=types_pb2.BeamSearch(**wanted), stop_token_ids=stop
    )
    candidates = [runner_pb2.Submit.Candidate(index=index) for index in range(num_hypotheses)]
    submit = runner_pb2.Submit(
        request=1, attempt=1, tenant="t", prompt_token_ids=[7] * 20, candidates=candidates, sampling=sampling
    )
    return runner_pb2.ServeRequest(submit=submit)


async def read_until_ended(gateway: Gateway, candidates: set[int]) -> list[runner_pb2.SequenceOutput]:
    outputs: list[runner_pb2.SequenceOutput] = []
    while not candidates <= {output.candidate for output in outputs if output.finish_reason}:
        message = await asyncio.wait_for(gateway.call.read(), TIMEOUT_S)
        outputs += message.step.outputs
    return outputs


async def test_a_beam_search_sends_its_answers_at_once_and_nothing_before(runner: Runner, gateway: Gateway) -> None:
    await gateway.call.write(beam_search(3, width=4))
    message = await asyncio.wait_for(gateway.call.read(), TIMEOUT_S)
    outputs = message.step.outputs
    assert not message.step.beams
    assert [(output.request, output.attempt, output.candidate, output.position) for output in outputs] == [
        (1, 1, 0, 0),
        (1, 1, 1, 0),
        (1, 1, 2, 0),
    ]
    scores = [output.score for output in outputs]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] < 0
    for output in outputs:
        assert output.finish_reason == (
            types_pb2.FINISH_REASON_LENGTH if len(output.token_ids) == 8 else types_pb2.FINISH_REASON_STOP
        )
        assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (20, len(output.token_ids))
    await all_blocks_free(runner)


async def test_intermediate_beams_come_after_each_step(gateway: Gateway) -> None:
    await gateway.call.write(beam_search(1, width=4, intermediate=True))
    seen: list[runner_pb2.BeamOutput] = []
    while True:
        message = await asyncio.wait_for(gateway.call.read(), TIMEOUT_S)
        seen += message.step.beams
        if message.step.outputs:
            break
    assert [len(beams.beams) for beams in seen] == [4] * len(seen)
    assert [len(beams.beams[0].token_ids) for beams in seen] == list(range(1, len(seen) + 1))
    assert len(seen) >= 2
    assert len(message.step.outputs) == 1


@pytest.mark.parametrize(
    ("width", "max_tokens", "detail"), [(17, 8, "at most 16 sequences"), (16, 100, "16 beams of 120 tokens")]
)
async def test_a_search_that_could_never_run_is_refused_at_the_door(
    gateway: Gateway, width: int, max_tokens: int, detail: str
) -> None:
    await gateway.call.write(beam_search(1, max_tokens, width=width))
    refusal = (await gateway.end_of(1)).refusal
    assert (refusal.code, refusal.field) == (runner_pb2.Refusal.CODE_INVALID, "sampling.beam_search.width")
    assert detail in refusal.detail


async def test_answers_of_a_search_are_cancelled_one_by_one(runner: Runner, gateway: Gateway) -> None:
    await gateway.call.write(beam_search(3, 60, range(0), width=4))
    await gateway.cancel(1, 0)
    message = await asyncio.wait_for(gateway.call.read(), TIMEOUT_S)
    assert [output.candidate for output in message.step.outputs] == [1, 2]
    await gateway.call.write(beam_search(2, 100, range(0), width=2))
    await gateway.cancel(1, 1)
    await gateway.cancel(1, 0)
    await all_blocks_free(runner)
    await gateway.submit(2, [5] * 20)
    await gateway.end_of(2)
    assert (1, 1) not in gateway.ended


async def _end_of_candidate(gateway: Gateway, candidate: int) -> runner_pb2.SequenceOutput:
    while True:
        message: runner_pb2.ServeResponse = await gateway.call.read()
        for output in message.step.outputs:
            if output.finish_reason:
                assert output.candidate == candidate
                return output
