"""A GPU's device without a GPU: on a stream whose work is done late, it does what the CPU's device does."""

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kernels.kv_layout import KvLayout
from model_runner.beam_search import BeamSearchParams, EarlyStopping
from model_runner.block_table import BlockTable
from model_runner.cuda.buckets import bucket_for, bucket_sizes
from model_runner.cuda.device import CudaDevice, DeviceLimits
from model_runner.cuda.staging import Staging
from model_runner.device import CpuDevice, Flight, check_device, view_pool
from model_runner.model.load import LoadedModel, load_decoder
from model_runner.sampling_params import SamplingParams
from model_runner.sequence import FinishReason, Sequence
from model_runner.step import Sampled, Scheduled, Step
from pagekeeper.common.errors import BugError, ConfigurationError
from pagekeeper.common.ids import BlockId, SequenceId
from pagekeeper.common.operations import BlockCopy, BlockRef
from tests.fakes.cuda_queue import FakeQueue, GraphKernels
from tests.fakes.engine import BLOCK_SIZE, DEADLINE_S, EngineUnderTest, running_engine
from tests.fakes.local_cache import LocalCache, LocalPool
from tests.models import write_tiny_model

LIMITS = DeviceLimits(max_batch_tokens=64, max_sequences=16, max_context_length=512)
NUM_BLOCKS = 64
GREEDY = SamplingParams(0.0, 1.0, 0, 0.0, 0, frozenset())
NUM_BINDING_SAMPLES = 10
"""How often binding a pool samples."""


@pytest.fixture(scope="module")
def kernels() -> GraphKernels:
    return GraphKernels()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, kernels: GraphKernels) -> LoadedModel:
    path: Path = tmp_path_factory.mktemp("model")
    return load_decoder(write_tiny_model(path / "tiny"), kernels)


class Played:
    """A device on a stream that is late, bound to a pool full of NaN."""

    def __init__(self, model: LoadedModel, kernels: GraphKernels, rng: random.Random | None = None) -> None:
        self.layout = model.kv_layout(BLOCK_SIZE)
        self.queue = FakeQueue(rng)
        self.device = CudaDevice(model.decoder, kernels, self.layout, LIMITS, self.queue)
        self.pool = poisoned_pool(self.layout)
        self.device.bind(self.pool.memory, NUM_BLOCKS)

    def launch(self, *entries: tuple[Sequence, int], copies: list[BlockCopy] | None = None) -> Flight:
        """Launch a step and let its sequences advance; nothing waits for it."""
        return launch(self.device, Step([Scheduled(*entry) for entry in entries], copies or []))


def launch(device: CudaDevice | CpuDevice, step: Step) -> Flight:
    flight = device.launch(device.prepare(step))
    for sequence, num_tokens in step.entries:
        sequence.num_computed += num_tokens
    return flight


def poisoned_pool(layout: KvLayout) -> LocalPool:
    pool = LocalPool(NUM_BLOCKS, layout)
    view_pool(pool.memory, layout, NUM_BLOCKS).blocks.fill_(float("nan"))
    return pool


def sequence_on(first_block: int, num_tokens: int = 40, sampling: SamplingParams = GREEDY) -> Sequence:
    """Known tokens, of which none is computed, on blocks that count down."""
    blocks = [BlockRef(BlockId(first_block - i), 1) for i in range(-(-num_tokens // BLOCK_SIZE))]
    tokens = random.Random(first_block).choices(range(3, 384), k=num_tokens)
    return Sequence(SequenceId(first_block), "t", tokens, num_tokens, 500, sampling, block_table=BlockTable(blocks))


@pytest.fixture
def played(model: LoadedModel, kernels: GraphKernels) -> Iterator[Played]:
    played = Played(model, kernels)
    yield played
    played.device.close()
    played.device.unbind()
    played.pool.memory.close()


# -- sizes


def test_sizes_rise_and_end_with_the_most() -> None:
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(3) == [1, 2, 3]
    assert bucket_sizes(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert bucket_sizes(100) == [*bucket_sizes(64), 80, 96, 100]
    assert len(bucket_sizes(256)) == 23


def test_a_step_gets_the_smallest_size_that_holds_it() -> None:
    sizes = bucket_sizes(20)
    assert [bucket_for(n, sizes) for n in (0, 1, 3, 4, 5, 9, 17, 20, 21)] == [None, 1, 4, 4, 8, 16, 20, 20, None]


# -- steps


def test_steps_in_flight_never_see_each_others_inputs(model: LoadedModel, kernels: GraphKernels) -> None:
    played = Played(model, kernels)
    reference, expected_pool = CpuDevice(model.decoder, kernels, played.layout), poisoned_pool(played.layout)
    reference.bind(expected_pool.memory, NUM_BLOCKS)
    chunks = (20, 1, 1, 7, 1, 10)

    def run(device: CudaDevice | CpuDevice, wait: bool) -> Iterator[Flight]:
        first, second = sequence_on(30), sequence_on(50)
        for num_tokens in chunks:
            flight = launch(device, Step([Scheduled(first, 1), Scheduled(second, num_tokens)], []))
            if wait:
                flight.result()
            yield flight

    expected = [flight.result()[0] for flight in run(reference, wait=True)]
    flights = list(run(played.device, wait=False))
    assert [flight.result()[0] for flight in flights[-2:]] == expected[-2:]
    for ours, theirs in zip(
        view_pool(played.pool.memory, played.layout, NUM_BLOCKS).blocks,
        view_pool(expected_pool.memory, played.layout, NUM_BLOCKS).blocks,
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, equal_nan=True)
    reference.close()


def test_a_buffer_is_not_written_before_its_copy_has_ended() -> None:
    queue = FakeQueue()
    staging, destination = Staging(queue, 4, 1), torch.zeros(4, dtype=torch.int64)
    staging.reserve(4)[:] = 1
    staging.copy_to(destination, queue)
    assert destination.tolist() == [0] * 4
    staging.reserve(4)[:] = 2
    assert destination.tolist() == [1] * 4


def test_more_words_than_a_buffer_holds_are_a_bug() -> None:
    with pytest.raises(BugError, match="5 words"):
        Staging(FakeQueue(), 4, 1).reserve(5)


def test_decodes_replay_a_graph_of_their_size_and_a_prefill_replays_none(played: Played) -> None:
    sequences = [sequence_on(10 + 10 * i, num_tokens=12) for i in range(3)]
    played.launch(*((sequence, 12) for sequence in sequences)).result()
    assert not any(graph.num_replays for graph in played.queue.graphs)
    for sequence in sequences:
        sequence.token_ids.append(5)
    sampled, _ = played.launch(*((sequence, 1) for sequence in sequences)).result()
    assert len(sampled.token_ids) == 3
    replays = {i: graph.num_replays for i, graph in enumerate(played.queue.graphs) if graph.num_replays}
    # Largest first, two of a size from 4 on: 16, 8, 4, 2, 1.
    assert replays == {4: 1}


def test_a_launched_step_has_not_ended_until_its_tokens_are_there(played: Played) -> None:
    flight = played.launch((sequence_on(30), 40))
    assert not flight.ended
    played.queue.synchronize()
    assert flight.ended
    sampled, ended_at = flight.result()
    assert len(sampled.token_ids) == 1
    assert ended_at > 0


def test_blocks_are_copied_before_anything_is_written(played: Played) -> None:
    sequence = sequence_on(30, num_tokens=12)
    played.launch((sequence, 12))
    sequence.token_ids.append(5)
    source = sequence.block_table.blocks[1]
    destination = BlockRef(BlockId(60), 1)
    sequence.block_table.rename(1, [destination])
    played.launch((sequence, 1), copies=[BlockCopy(1, source, destination, 4)]).result()
    blocks = view_pool(played.pool.memory, played.layout, NUM_BLOCKS).blocks
    assert blocks[60, ..., :4, :].equal(blocks[source.id, ..., :4, :])
    assert not blocks[60, ..., 4, :].isnan().any()
    assert blocks[source.id, ..., 4, :].isnan().all()


def test_a_step_of_copies_alone_copies(played: Played) -> None:
    sequence = sequence_on(30, num_tokens=8)
    played.launch((sequence, 8))
    source = sequence.block_table.blocks[0]
    flight = played.launch(copies=[BlockCopy(0, source, BlockRef(BlockId(60), 1), 8)])
    assert flight.result()[0] == Sampled([])
    blocks = view_pool(played.pool.memory, played.layout, NUM_BLOCKS).blocks
    assert blocks[60].equal(blocks[source.id])


def test_decodes_with_a_long_prefix_in_common_replay_the_graph_that_reads_it_once(
    played: Played, kernels: GraphKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("model_runner.shared_prefix.MIN_SAVED_TOKENS", 100)
    prefix = sequence_on(63, num_tokens=64)
    played.launch((prefix, 64)).result()
    sequences = [sequence_on(20 + i, num_tokens=8) for i in range(5)]
    for sequence in sequences:
        own = sequence.block_table.blocks
        sequence.block_table.resize(0, [*prefix.block_table.blocks, *own])
        sequence.token_ids = [*prefix.token_ids, 7 + sequence.id]
        sequence.num_computed = 64
    kernels.num_shared.clear()
    shared, _ = played.launch(*((sequence, 1) for sequence in sequences)).result()
    assert set(kernels.num_shared) == {8}
    monkeypatch.setattr("model_runner.shared_prefix.MIN_SAVED_TOKENS", 10**9)
    for sequence in sequences:
        sequence.num_computed = 64
    kernels.num_shared.clear()
    assert played.launch(*((sequence, 1) for sequence in sequences)).result()[0] == shared
    assert not kernels.num_shared


# -- whole engines


def make(kernels: GraphKernels, queues: list[FakeQueue], seed: int):  # noqa: ANN201 - a device for `running_engine`
    def make_device(model: LoadedModel, layout: KvLayout) -> CudaDevice:
        queues.append(FakeQueue(random.Random(seed)))
        return CudaDevice(model.decoder, kernels, layout, LIMITS, queues[-1])

    return make_device


def answers(under_test: EngineUnderTest) -> list[tuple[list[int], FinishReason | None]]:
    """A mixed trace: chunks, a common prefix, random sampling, stop tokens, and one that is cancelled."""
    prefix = random.Random(0).choices(range(3, 384), k=36)
    prompts = [prefix[: 4 * i] + random.Random(i).choices(range(3, 384), k=3 + 9 * i % 50) for i in range(10)]
    submitted = [
        under_test.submit(
            prompt, max_tokens=12 + i, temperature=0.8 * (i % 2), seed=i, stop=frozenset(range(3, 3 + 4 * i))
        )
        for i, prompt in enumerate(prompts)
    ]
    victim = under_test.submit(prompts[0], max_tokens=400)
    while len(victim.token_ids) < 3:
        under_test.steps.get(timeout=30)
    under_test.engine.cancel(victim.sequence.id)
    under_test.wait(*submitted)
    return [(answer.token_ids, answer.finish_reason) for answer in submitted]


@pytest.mark.parametrize("seed", range(3))
def test_an_engine_answers_as_on_the_cpu(model: LoadedModel, kernels: GraphKernels, seed: int) -> None:
    with running_engine(model) as under_test:
        expected = answers(under_test)
    queues: list[FakeQueue] = []
    options = {"max_batch_tokens": LIMITS.max_batch_tokens, "max_sequences": LIMITS.max_sequences}
    with running_engine(model, make_device=make(kernels, queues, seed), **options) as under_test:
        assert answers(under_test) == expected
        under_test.settle()
    assert sum(graph.num_replays for graph in queues[0].graphs) > 10


@pytest.mark.parametrize("prompt_length", [1, 21, 24])
def test_candidates_and_beams_answer_as_on_the_cpu(
    model: LoadedModel, kernels: GraphKernels, prompt_length: int
) -> None:
    prompt = random.Random(1).choices(range(3, 384), k=prompt_length)
    params = BeamSearchParams(5, 1.0, EarlyStopping.FALSE, 5, intermediate=False)

    def run(**options: object) -> tuple[list[list[int]], list[list[int]]]:
        with running_engine(model, max_sequences=LIMITS.max_sequences, **options) as under_test:
            # The prompt's last token is a decode the second time, with more samples than sequences.
            for _ in range(2):
                candidates = under_test.wait(*under_test.submit_candidates(prompt, 5, seed=3))
            search = under_test.search(prompt, params, stop=frozenset(range(3, 40)))
            under_test.wait(search)
            under_test.settle()
        return candidates, [hypothesis.token_ids for hypothesis in search.hypotheses]

    assert run(make_device=make(kernels, [], 0)) == run()


def test_sequences_that_give_way_to_each_other_answer_as_on_the_cpu(model: LoadedModel, kernels: GraphKernels) -> None:
    prompts = [random.Random(i).choices(range(3, 384), k=20) for i in range(6)]

    def run(**options: object) -> list[list[int]]:
        with running_engine(model, num_blocks=24, max_sequences=16, **options) as under_test:
            found = under_test.wait(*[under_test.submit(prompt, max_tokens=40) for prompt in prompts])
            assert under_test.scheduler.num_preemptions > 0
            under_test.settle()
        return found

    assert run(make_device=make(kernels, [], 0)) == run()


def test_case_39_another_pool_gets_new_graphs_and_the_old_one_can_be_unmapped(
    model: LoadedModel, kernels: GraphKernels
) -> None:
    """Case 39: the survivor unmaps when its session ends: no graph and no view is left of the old pool."""
    queues: list[FakeQueue] = []
    prompt = random.Random(0).choices(range(3, 384), k=20)
    with running_engine(model) as under_test:
        expected = under_test.wait(under_test.submit(prompt, max_tokens=60))
    with running_engine(model, max_sequences=16, make_device=make(kernels, queues, 0)) as under_test:
        answer = under_test.submit(prompt, max_tokens=60)
        while len(answer.token_ids) < 10:
            under_test.steps.get(timeout=30)
        under_test.cache.lose("closed")
        assert under_test.wait(answer) == expected
        old, new = (cache.pool.memory for cache in under_test.caches)
        old.close()
        assert old._mapping.closed
        assert not new._mapping.closed
    queue = queues[0]
    half = len(queue.graphs) // 2
    assert {graph.memory for graph in queue.graphs[:half]}.isdisjoint(graph.memory for graph in queue.graphs[half:])
    assert queue.graphs[-1].num_replays > 0
    assert queue.num_releases == 2


# -- a pool is bound and let go


def test_binding_a_pool_changes_no_byte_of_it(model: LoadedModel, kernels: GraphKernels) -> None:
    layout = model.kv_layout(BLOCK_SIZE)
    before = bytes(poisoned_pool(layout).memory.array())
    assert bytes(Played(model, kernels).pool.memory.array()) == before


def test_graphs_are_captured_largest_first_in_one_memory(played: Played) -> None:
    # 16, 8 and 4 with and without a shared prefix, 2 and 1 without.
    assert len(played.queue.graphs) == 8
    assert len({id(graph.memory) for graph in played.queue.graphs}) == 1


def test_unbinding_drops_every_view(played: Played) -> None:
    played.launch((sequence_on(30), 40)).result()
    played.device.unbind()
    played.device.unbind()
    played.pool.memory.close()
    assert played.pool.memory._mapping.closed
    with pytest.raises(BugError, match="no pool"):
        played.launch((sequence_on(30), 40))


def test_too_little_memory_is_an_error_of_the_configuration_and_lets_the_pool_go(
    model: LoadedModel, kernels: GraphKernels
) -> None:
    class Full(FakeQueue):
        def capture(self, *_: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

    layout, pool = model.kv_layout(BLOCK_SIZE), poisoned_pool(model.kv_layout(BLOCK_SIZE))
    device = CudaDevice(model.decoder, kernels, layout, LIMITS, Full())
    with pytest.raises(ConfigurationError, match="too small") as raised:
        device.bind(pool.memory, NUM_BLOCKS)
    device.unbind()
    pool.memory.close()
    assert pool.memory._mapping.closed
    assert raised.value is not None  # and with it every frame that the error has passed


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("Triton Error [CUDA]: out of memory", ConfigurationError),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", ConfigurationError),
        ("CUDA error: an illegal memory access was encountered", RuntimeError),
    ],
)
def test_too_little_memory_has_many_words_and_other_errors_are_none_of_it(
    model: LoadedModel, kernels: GraphKernels, words: str, expected: type[Exception]
) -> None:
    class Failing(FakeQueue):
        def capture(self, *_: object) -> None:
            raise RuntimeError(words)

    layout = model.kv_layout(BLOCK_SIZE)
    device = CudaDevice(model.decoder, kernels, layout, LIMITS, Failing())
    with pytest.raises(expected):
        device.bind(poisoned_pool(layout).memory, NUM_BLOCKS)


def test_a_pool_on_another_device_is_an_error_of_the_configuration() -> None:
    with pytest.raises(ConfigurationError, match="the model is on cuda:0 and the cache manager's pool on cpu"):
        check_device(torch.device("cpu"), torch.device("cuda:0"))


# -- errors of the device


def failing(kernels: GraphKernels, after: int) -> GraphKernels:
    """Kernels of which the sampling fails at its call number `after`."""
    calls = itertools.count(1)
    broken, sample = GraphKernels(), kernels.sample

    def fail_later(logits: torch.Tensor, batch: object) -> torch.Tensor:
        if next(calls) >= after:
            raise ValueError("an illegal address")
        return sample(logits, batch)

    broken.sample = fail_later
    return broken


def test_a_step_that_fails_has_ended_and_says_so_to_who_waits(model: LoadedModel, kernels: GraphKernels) -> None:
    played = Played(model, failing(kernels, after=NUM_BINDING_SAMPLES + 1))
    flight = played.launch((sequence_on(30), 40))
    with pytest.raises(RuntimeError, match="CUDA error"):
        flight.result()
    assert flight.ended
    with pytest.raises(RuntimeError, match="CUDA error"):
        played.device.unbind()
    played.pool.memory.close()
    assert played.pool.memory._mapping.closed


def test_an_engine_whose_device_fails_ends_with_its_error_and_its_session(
    model: LoadedModel, kernels: GraphKernels
) -> None:
    def body() -> None:
        with running_engine(
            model, max_sequences=16, make_device=make(failing(kernels, after=NUM_BINDING_SAMPLES + 4), [], 0)
        ) as under_test:
            under_tests.append(under_test)
            under_test.submit([5] * 20)
            assert under_test.engine.wait_until_attached()
            deadline = time.monotonic() + DEADLINE_S
            while under_test.failure is None:
                assert time.monotonic() < deadline
                time.sleep(0.01)

    under_tests: list[EngineUnderTest] = []
    with pytest.raises(RuntimeError, match="CUDA error"):
        body()
    cache: LocalCache = under_tests[0].cache
    assert cache.pool.policy.stats().usage.sequences == 0


def test_a_launch_that_fails_leaves_no_view_that_would_keep_the_pool_mapped(
    model: LoadedModel, kernels: GraphKernels
) -> None:
    class Full(FakeQueue):
        def run(self, work: Callable[[], None]) -> None:
            super().run(work)
            if bound.is_set():
                raise torch.OutOfMemoryError("CUDA out of memory")

    class Unmapping(LocalCache):
        def close(self) -> None:
            super().close()
            self.pool.memory.close()
            unmapped.append(self.pool.memory._mapping.closed)

    def make_device(model: LoadedModel, layout: KvLayout) -> CudaDevice:
        return CudaDevice(model.decoder, kernels, layout, LIMITS, Full())

    def body() -> None:
        with running_engine(model, max_sequences=16, cache_type=Unmapping, make_device=make_device) as under_test:
            assert under_test.engine.wait_until_attached()
            bound.set()
            under_test.submit([5] * 20)
            deadline = time.monotonic() + DEADLINE_S
            while under_test.failure is None:
                assert time.monotonic() < deadline
                time.sleep(0.01)

    bound, unmapped = threading.Event(), list[bool]()
    with pytest.raises(torch.OutOfMemoryError):
        body()
    assert unmapped == [True]
