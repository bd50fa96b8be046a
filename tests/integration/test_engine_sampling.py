"""Every sampling parameter through the whole engine: token by token what the rules say, whatever else goes on."""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels.kv_layout import KvLayout
from model_runner import choice
from model_runner.beam_search import BeamSearchParams, EarlyStopping
from model_runner.cuda.device import CudaDevice, DeviceLimits
from model_runner.device import Device
from model_runner.logprobs import TokenLogprobs
from model_runner.model.decoder import Hidden
from model_runner.model.load import LoadedModel, load_decoder
from model_runner.sampling_params import SamplingParams
from tests.fakes.cuda_queue import FakeQueue, GraphKernels
from tests.fakes.engine import Answer, EngineUnderTest, cpu_device, load_tiny, running_engine
from tests.fakes.local_cache import LocalCache
from tests.integration.test_engine import ShortCache, prompt_of
from tests.models import write_tiny_model
from tests.paging import Chunk, PagedPool
from tests.plain_sampling import Row, edited, log_softmax

VOCAB = 384
PLAIN = SamplingParams(0.0, 1.0, 0, 0.0, 0, frozenset())
LENGTH = 12
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def model(path: Path) -> LoadedModel:
    return load_tiny(path)


def played_gpu(model: LoadedModel, layout: KvLayout) -> CudaDevice:
    queue = FakeQueue(random.Random(0))
    return CudaDevice(model.decoder, GraphKernels(), layout, DeviceLimits(64, 64, 512), queue)


@pytest.fixture(params=[cpu_device, played_gpu], ids=["cpu", "played gpu"])
def engine(request: pytest.FixtureRequest, path: Path, model: LoadedModel) -> Iterator[EngineUnderTest]:
    make_device: Callable[[LoadedModel, KvLayout], Device] = request.param
    loaded = model if make_device is cpu_device else load_decoder(path, GraphKernels())
    with running_engine(loaded, make_device=make_device) as under_test:
        yield under_test
        under_test.settle()


def logits_after(model: LoadedModel, tokens: list[int]) -> list[list[float]]:
    """Of each of the tokens, computed at once and alone."""
    pool = PagedPool(model.kv_layout(8), 2 + len(tokens) // 8 + 1)
    pool.open(len(tokens))
    rows = torch.arange(len(tokens))
    batch = pool.batch([Chunk(0, 0, len(tokens))])
    return model.decoder.forward(torch.tensor(tokens), rows, batch, pool.kv, rows).tolist()


def greedy_by_the_rules(model: LoadedModel, prompt: list[int], params: SamplingParams, length: int) -> list[int]:
    answer: list[int] = []
    while len(answer) < length:
        logits = edited(logits_after(model, prompt + answer)[-1], Row.of(params, prompt, answer))
        token = logits.index(max(logits))
        if token in params.stop_token_ids:
            break
        answer.append(token)
    return answer


def submit(engine: EngineUnderTest, prompt: list[int], params: SamplingParams, **options: object) -> Answer:
    """With every field of `params`."""
    named = {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}
    return engine.submit(prompt, LENGTH, stop=named.pop("stop_token_ids"), **named, **options)


ASKING = {
    "repetition": {"repetition_penalty": 1.8},
    "a wish for repetition": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 1.5, "presence_penalty": -0.5},
    "bias": {"logit_bias": {7: 6.0, 9: 5.0, 11: -math.inf}},
    "allowed": {"allowed_token_ids": (20, 21, 22, 23, 24, 25), "repetition_penalty": 1.5},
}


def test_greedy_answers_are_those_of_the_rules_among_neighbours_that_ask_for_nothing(
    engine: EngineUnderTest, model: LoadedModel
) -> None:
    prompts = {name: prompt_of(5 + 9 * i, seed=i) for i, name in enumerate(ASKING)}
    asking = {name: replace(PLAIN, **changes) for name, changes in ASKING.items()}
    answers = {}
    neighbours = []
    for i, (name, prompt) in enumerate(prompts.items()):
        answers[name] = submit(engine, prompt, asking[name])
        neighbours.append((prompt_of(7, seed=50 + i), submit(engine, prompt_of(7, seed=50 + i), PLAIN)))
    engine.wait(*answers.values(), *[answer for _, answer in neighbours])
    for name, answer in answers.items():
        assert answer.token_ids == greedy_by_the_rules(model, prompts[name], asking[name], LENGTH), name
    for prompt, answer in neighbours:
        assert answer.token_ids == greedy_by_the_rules(model, prompt, PLAIN, LENGTH)


def test_bad_words_never_occur_and_no_stop_token_comes_too_early(engine: EngineUnderTest, model: LoadedModel) -> None:
    prompt = prompt_of(9, seed=3)
    free = greedy_by_the_rules(model, prompt, PLAIN, LENGTH)
    words = ((free[0],), tuple(free[1:3]), tuple(free[3:6]), tuple(free[6:8]))
    banning = replace(PLAIN, bad_words=words)
    stopping = replace(PLAIN, stop_token_ids=frozenset(free[1:3]), min_tokens=6)
    banned, late = submit(engine, prompt, banning), submit(engine, prompt, stopping)
    engine.wait(banned, late)
    assert banned.token_ids == greedy_by_the_rules(model, prompt, banning, LENGTH)
    text = tuple(banned.token_ids)
    assert all(text[i : i + len(word)] != word for word in words for i in range(len(text)))
    assert late.token_ids == greedy_by_the_rules(model, prompt, stopping, LENGTH)
    assert len(late.token_ids) >= 6


def test_case_20_a_banned_argmax_never_appears(engine: EngineUnderTest, model: LoadedModel) -> None:
    """Case 20: banning the argmax token means it never appears."""
    prompt = prompt_of(6, seed=1)
    banned: set[int] = set()
    for _ in range(5):
        params = replace(PLAIN, logit_bias=dict.fromkeys(banned, -math.inf))
        hot = replace(params, temperature=1.5, seed=4)
        greedy, drawn = submit(engine, prompt, params), submit(engine, prompt, hot)
        engine.wait(greedy, drawn)
        assert not banned & {*greedy.token_ids, *drawn.token_ids}
        assert greedy.token_ids == greedy_by_the_rules(model, prompt, params, LENGTH)
        banned.add(greedy.token_ids[0])


def test_case_23_seed_42_alone_is_seed_42_among_seven_neighbours(engine: EngineUnderTest) -> None:
    """Case 23: a seeded request does not change with what else is in the batch."""
    prompt = prompt_of(12, seed=5)
    seeded = replace(PLAIN, temperature=1.2, seed=42, typical_p=0.9, top_p=0.95, presence_penalty=0.5)
    alone = submit(engine, prompt, seeded)
    engine.wait(alone)
    mixed = [replace(PLAIN, temperature=0.4 * i, seed=random.getrandbits(64)) for i in range(3)]
    mixed += [replace(mixed[1], **changes) for changes in list(ASKING.values())[:4]]
    neighbours = [submit(engine, prompt_of(5 + 3 * i, seed=i), params) for i, params in enumerate(mixed)]
    among = submit(engine, prompt, seeded)
    engine.wait(among, *neighbours)
    assert among.token_ids == alone.token_ids


def check_told(told: list[TokenLogprobs], tokens: list[int], logits: list[list[float]], num_top: int) -> None:
    assert [entry.token_id for entry in told] == tokens
    for entry, row in zip(told, logits, strict=True):
        logprobs = log_softmax(row)
        likeliest = sorted(range(VOCAB), key=lambda token: -row[token])[:num_top]
        assert entry.logprob == pytest.approx(logprobs[entry.token_id], abs=TOLERANCE)
        assert entry.rank == 1 + sum(value > row[entry.token_id] for value in row)
        assert entry.top_token_ids == likeliest
        assert entry.top_logprobs == pytest.approx([logprobs[token] for token in likeliest], abs=TOLERANCE)


@pytest.mark.parametrize(("num_top", "num_prompt_top"), [(0, 2), (3, 0), (None, 5), (5, None)])
def test_logprobs_are_those_of_the_models_own_logits(
    engine: EngineUnderTest, model: LoadedModel, num_top: int | None, num_prompt_top: int | None
) -> None:
    # More than one chunk; the neighbour has bits of its prompt in the same steps.
    prompt, other = prompt_of(150, seed=7), prompt_of(70, seed=8)
    params = replace(PLAIN, temperature=1.0, seed=3, repetition_penalty=3.0, logprobs=num_top)
    answer = submit(engine, prompt, params, prompt_logprobs=num_prompt_top)
    neighbour = submit(engine, other, PLAIN, prompt_logprobs=1)
    engine.wait(answer, neighbour)
    for asked, top, text in ((answer, num_prompt_top, prompt), (neighbour, 1, other)):
        logits = logits_after(model, text + asked.token_ids)
        if top is not None:
            check_told(asked.sequence.prompt_logprobs.found, text[1:], logits[: len(text) - 1], top)
            assert asked.sequence.num_cached_tokens == 0
        if asked.sequence.sampling.logprobs is None:
            assert asked.logprobs == []
        else:
            check_told(asked.logprobs, asked.token_ids, logits[len(text) - 1 : -1], num_top)


def test_logits_of_a_prompt_exist_of_a_few_tokens_at_a_time(
    path: Path, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, heights = load_tiny(path), []
    make_logits = loaded.decoder.logits

    def noting(hidden: Hidden, rows: torch.Tensor) -> torch.Tensor:
        heights.append(len(rows))
        return make_logits(hidden, rows)

    monkeypatch.setattr(loaded.decoder, "logits", noting)
    monkeypatch.setattr(choice, "_PROMPT_LOGITS", 7 * VOCAB + 3)
    prompt = prompt_of(100, seed=1)
    with running_engine(loaded, max_batch_tokens=48) as under_test:
        under_test.wait(submit(under_test, [5], PLAIN))  # whose steps, and those that warm up, do not count
        heights.clear()
        answer = submit(under_test, prompt, PLAIN, prompt_logprobs=1)
        under_test.wait(answer)
    check_told(answer.sequence.prompt_logprobs.found, prompt[1:], logits_after(model, prompt)[:-1], 1)
    assert max(heights) == 7
    assert sum(heights) == 99 + len(answer.token_ids)


def test_a_prompt_whose_logprobs_are_wanted_is_computed_again_though_it_is_cached(engine: EngineUnderTest) -> None:
    prompt = prompt_of(40, seed=9)
    first = submit(engine, prompt, PLAIN)
    engine.wait(first)
    warm, asking = submit(engine, prompt, PLAIN), submit(engine, prompt, PLAIN, prompt_logprobs=0)
    engine.wait(warm, asking)
    assert (warm.sequence.num_cached_tokens, asking.sequence.num_cached_tokens) == (39, 0)
    assert warm.token_ids == asking.token_ids == first.token_ids
    assert asking.sequence.prompt_logprobs.is_complete


def test_a_prompt_of_one_token_has_no_logprobs(engine: EngineUnderTest) -> None:
    answer = submit(engine, [5], PLAIN, prompt_logprobs=3)
    engine.wait(answer)
    assert answer.sequence.prompt_logprobs.is_complete
    assert answer.sequence.prompt_logprobs.found == []


def test_candidates_share_one_computation_of_the_prompts_logprobs(engine: EngineUnderTest, model: LoadedModel) -> None:
    prompt = prompt_of(21, seed=2)
    options = {"prompt_logprobs": 2, "logprobs": 1, "presence_penalty": 1.5}
    answers = engine.submit_candidates(prompt, 3, 8, temperature=3.0, seed=6, **options)
    engine.wait(*answers)
    check_told(answers[0].sequence.prompt_logprobs.found, prompt[1:], logits_after(model, prompt)[:-1], 2)
    for answer in answers:
        logits = logits_after(model, prompt + answer.token_ids)
        check_told(answer.logprobs, answer.token_ids, logits[len(prompt) - 1 : -1], 1)
    assert len({tuple(answer.token_ids) for answer in answers}) == 3


def test_beams_obey_the_rules_and_tell_how_likely_their_tokens_were(
    engine: EngineUnderTest, model: LoadedModel
) -> None:
    prompt = prompt_of(20, seed=4)
    beams = BeamSearchParams(3, 0.0, EarlyStopping.FALSE, 3, intermediate=False)
    free = engine.search(prompt, beams, 6)
    engine.wait(free)
    word = tuple(free.hypotheses[0].token_ids[2:4])
    asking = engine.search(prompt, beams, 6, logprobs=2, bad_words=(word,), repetition_penalty=1.3)
    engine.wait(asking)
    for hypothesis in asking.hypotheses:
        tokens, score = hypothesis.token_ids, 0.0
        logits = logits_after(model, prompt + tokens)[len(prompt) - 1 : -1]
        check_told(hypothesis.logprobs, tokens, logits, 2)
        for i, row in enumerate(logits):
            params = replace(PLAIN, bad_words=(word,), repetition_penalty=1.3)
            score += log_softmax(edited(row, Row.of(params, prompt, tokens[:i])))[tokens[i]]
        assert hypothesis.score == pytest.approx(score, abs=1e-3)
        assert all(tuple(tokens[i : i + 2]) != word for i in range(len(tokens)))


EVERYTHING = replace(
    PLAIN,
    temperature=0.9,
    seed=8,
    typical_p=0.95,
    repetition_penalty=1.2,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    logit_bias={5: 2.0},
    bad_words=((9,), (5, 6), (5, 5)),
    min_tokens=3,
    stop_token_ids=frozenset({12}),
    logprobs=2,
)


def same_but_for_rounding(ours: list[TokenLogprobs], theirs: list[TokenLogprobs]) -> bool:
    return all(
        (a.token_id, a.rank, a.top_token_ids) == (b.token_id, b.rank, b.top_token_ids)
        and [a.logprob, *a.top_logprobs] == pytest.approx([b.logprob, *b.top_logprobs], abs=TOLERANCE)
        for a, b in zip(ours, theirs, strict=True)
    )


@pytest.fixture(scope="module")
def undisturbed(model: LoadedModel) -> Callable[[list[int], int], Answer]:
    def answer(prompt: list[int], seed: int) -> Answer:
        with running_engine(model) as under_test:
            answer = submit(under_test, prompt, replace(EVERYTHING, seed=seed), prompt_logprobs=1)
            under_test.wait(answer)
        return answer

    return answer


def check_same(ours: Answer, expected: Answer) -> None:
    assert ours.token_ids == expected.token_ids
    assert same_but_for_rounding(ours.logprobs, expected.logprobs[len(expected.logprobs) - len(ours.logprobs) :])
    assert same_but_for_rounding(ours.sequence.prompt_logprobs.found, expected.sequence.prompt_logprobs.found)


@pytest.mark.parametrize(("cache_type", "num_blocks"), [(ShortCache, 256), (LocalCache, 12)])
def test_preemption_changes_nothing(
    model: LoadedModel,
    undisturbed: Callable[[list[int], int], Answer],
    cache_type: type[LocalCache],
    num_blocks: int,
) -> None:
    prompts = [prompt_of(30 + i, seed=i) for i in range(5)]
    with running_engine(model, num_blocks, max_batch_tokens=16, cache_type=cache_type) as under_test:
        answers = [
            submit(under_test, prompt, replace(EVERYTHING, seed=i), prompt_logprobs=1)
            for i, prompt in enumerate(prompts)
        ]
        under_test.wait(*answers)
        assert under_test.scheduler.num_preemptions > 0
        under_test.settle()
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        check_same(answer, undisturbed(prompt, i))


def test_resumption_after_any_token_changes_nothing(
    model: LoadedModel, undisturbed: Callable[[list[int], int], Answer]
) -> None:
    prompt = prompt_of(33, seed=6)
    expected = undisturbed(prompt, 8)
    with running_engine(model, max_batch_tokens=16) as under_test:
        for received in (0, 1, 5, len(expected.token_ids) - 1):
            generated = tuple(expected.token_ids[:received])
            answer = submit(under_test, prompt, EVERYTHING, generated=generated, prompt_logprobs=1)
            under_test.wait(answer)
            check_same(answer, expected)


def test_a_lost_cache_manager_changes_nothing(
    model: LoadedModel, undisturbed: Callable[[list[int], int], Answer]
) -> None:
    prompts = [prompt_of(60 + i, seed=i) for i in range(3)]
    with running_engine(model, max_batch_tokens=16) as under_test:
        answers = [submit(under_test, prompt, EVERYTHING, prompt_logprobs=1) for prompt in prompts]
        for reason in ("the stream broke", "closed"):
            for _ in range(4):
                under_test.cache.lose(reason)
        under_test.wait(*answers)
    for prompt, answer in zip(prompts, answers, strict=True):
        check_same(answer, undisturbed(prompt, 8))
