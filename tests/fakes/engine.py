"""An engine in this process: real scheduler, device, decoder and policy, on a cache without sockets."""

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from cache_manager.client import Exchange
from kernels.kv_layout import KvLayout
from kernels.select import select_kernels
from model_runner.beam_group import BeamGroup
from model_runner.beam_search import BeamSearch, BeamSearchParams
from model_runner.device import CpuDevice, Device
from model_runner.engine import Engine, StepCost
from model_runner.logprobs import PromptLogprobs, TokenLogprobs
from model_runner.model.load import LoadedModel, load_decoder
from model_runner.sampling_params import SamplingParams
from model_runner.scheduler import Scheduler, SchedulerLimits
from model_runner.sequence import FinishReason, Sequence
from model_runner.step import BeamsOutput, Hypothesis, Output
from pagekeeper.common.ids import SequenceId
from tests.fakes.local_cache import LocalCache, LocalPool

BLOCK_SIZE = 8
DEADLINE_S = 30.0


def load_tiny(path: Path) -> LoadedModel:
    return load_decoder(path, select_kernels("cpu"))


def cpu_device(model: LoadedModel, layout: KvLayout) -> Device:
    return CpuDevice(model.decoder, select_kernels("cpu"), layout)


@dataclass
class Answer:
    """What came out of a sequence, or of a beam search: then `sequence` is its leader."""

    sequence: Sequence
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    hypotheses: list[Hypothesis] = field(default_factory=list)
    beams: list[list[Hypothesis]] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)


class EngineUnderTest:
    """Submit, cancel and wait; positions of outputs are checked as they come."""

    def __init__(
        self,
        model: LoadedModel,
        num_blocks: int,
        max_batch_tokens: int,
        max_sequences: int,
        cache_type: type[LocalCache],
        pool: LocalPool | None,
        make_device: Callable[[LoadedModel, KvLayout], Device],
    ) -> None:
        layout = model.kv_layout(BLOCK_SIZE)
        self.caches: list[LocalCache] = []
        self._cache_type = cache_type
        self._new_pool = lambda: pool or LocalPool(num_blocks, layout)
        self.scheduler = Scheduler(SchedulerLimits(BLOCK_SIZE, max_batch_tokens, max_sequences))
        self.engine = Engine(
            self.scheduler,
            make_device(model, layout),
            self._connect,
            self._deliver,
            StepCost(60.0, 1.0),
        )
        self._ids = itertools.count(1)
        self._answers: dict[int, Answer] = {}
        self.steps: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.failure: BaseException | None = None

    @property
    def cache(self) -> LocalCache:
        return self.caches[-1]

    def submit(
        self,
        prompt: list[int],
        max_tokens: int = 24,
        *,
        generated: tuple[int, ...] = (),
        max_context: int = 512,
        temperature: float = 0.0,
        seed: int = 0,
        stop: frozenset[int] = frozenset(),
        top_p: float = 1.0,
        priority: int = 0,
        prompt_logprobs: int | None = None,
        **more: object,
    ) -> Answer:
        """`more` names fields of SamplingParams."""
        sampling = replace(SamplingParams(temperature, top_p, 0, 0.0, seed, stop), **more)
        sequence = self._sequence(prompt, max_tokens, generated, sampling, max_context=max_context, priority=priority)
        if prompt_logprobs is not None:
            sequence.prompt_logprobs = PromptLogprobs(prompt_logprobs, len(prompt) - 1)
        answer = self._answer(sequence)
        self.engine.submit(sequence)
        return answer

    def submit_candidates(
        self,
        prompt: list[int],
        n: int,
        max_tokens: int = 24,
        *,
        generated: dict[int, list[int]] | None = None,
        max_context: int = 512,
        temperature: float = 1.0,
        seed: int = 0,
        stop: frozenset[int] = frozenset(),
        prompt_logprobs: int | None = None,
        **more: object,
    ) -> list[Answer]:
        """Several candidates; `generated` names those that are resumed, if not all of them start."""
        sampling = replace(SamplingParams(temperature, 1.0, 0, 0.0, seed, stop), **more)
        resumed = dict.fromkeys(range(n), ()) if generated is None else generated
        sequences = [
            self._sequence(prompt, max_tokens, tuple(tokens), sampling, candidate=index, max_context=max_context)
            for index, tokens in resumed.items()
        ]
        if prompt_logprobs is not None:
            shared = PromptLogprobs(prompt_logprobs, len(prompt) - 1)
            for sequence in sequences:
                sequence.prompt_logprobs = shared
        answers = [self._answer(sequence) for sequence in sequences]
        self.engine.submit(*sequences)
        return answers

    def search(
        self,
        prompt: list[int],
        params: BeamSearchParams,
        max_tokens: int = 24,
        *,
        stop: frozenset[int] = frozenset(),
        **more: object,
    ) -> Answer:
        search = BeamSearch(params, stop, max_tokens)
        sampling = replace(SamplingParams(0.0, 1.0, 0, 0.0, 0, stop), **more)
        sequences = [self._sequence(prompt, max_tokens, (), sampling) for _ in range(params.width)]
        group = BeamGroup(search, sequences)
        for sequence in sequences:
            sequence.beams, sequence.num_continuations = group, search.num_continuations
        answer = self._answer(group.leader)
        self.engine.submit(*sequences)
        return answer

    def _sequence(
        self,
        prompt: list[int],
        max_tokens: int,
        generated: tuple[int, ...],
        sampling: SamplingParams,
        *,
        candidate: int = 0,
        max_context: int = 512,
        priority: int = 0,
    ) -> Sequence:
        return Sequence(
            id=SequenceId(next(self._ids)),
            tenant="t",
            token_ids=[*prompt, *generated],
            num_prompt_tokens=len(prompt),
            max_total_tokens=min(len(prompt) + max_tokens, max_context),
            sampling=sampling,
            candidate=candidate,
            priority=priority,
            num_resumed_tokens=len(generated),
            was_computed=len(prompt) + len(generated) - 1 if generated else 0,
        )

    def _answer(self, sequence: Sequence) -> Answer:
        generated = sequence.token_ids[sequence.num_prompt_tokens :]
        answer = self._answers[sequence.id] = Answer(sequence, generated)
        return answer

    def wait(self, *answers: Answer) -> list[list[int]]:
        for answer in answers:
            assert answer.ended.wait(DEADLINE_S), f"sequence {answer.sequence.id} did not end: {self.failure!r}"
        return [answer.token_ids for answer in answers]

    def settle(self) -> None:
        """Wait until nothing is left to do and every let-go block has come back."""
        deadline = time.monotonic() + DEADLINE_S
        policy = self.cache.pool.policy
        while policy.stats().pool.free_blocks != self.cache.granted.num_blocks - 1:
            assert time.monotonic() < deadline, policy.stats()
            time.sleep(0.005)
        assert policy.check_integrity() == []

    def _connect(self) -> Exchange:
        self.caches.append(self._cache_type(self._new_pool(), "runner"))
        return self.caches[-1]

    def _deliver(self, step: int, outputs: list[Output | BeamsOutput]) -> None:
        for output in outputs:
            if isinstance(output, BeamsOutput):
                answer = self._answers[output.leader.id]
                if output.ended:
                    answer.hypotheses = output.hypotheses
                    answer.ended.set()
                else:
                    answer.beams.append(output.hypotheses)
                continue
            answer = self._answers[output.sequence.id]
            assert answer.finish_reason is None
            assert output.position == len(answer.token_ids)
            if output.token_id is not None:
                answer.token_ids.append(output.token_id)
                answer.logprobs += [output.logprobs] if output.logprobs is not None else []
            if output.finish_reason is not None:
                answer.finish_reason = output.finish_reason
                answer.ended.set()
        self.steps.put(step)


@contextmanager
def running_engine(
    model: LoadedModel,
    num_blocks: int = 256,
    max_batch_tokens: int = 64,
    max_sequences: int = 64,
    cache_type: type[LocalCache] = LocalCache,
    pool: LocalPool | None = None,
    make_device: Callable[[LoadedModel, KvLayout], Device] = cpu_device,
) -> Iterator[EngineUnderTest]:
    """An engine on a pool of its own with `num_blocks` blocks, or on `pool`, which others may share."""
    under_test = EngineUnderTest(model, num_blocks, max_batch_tokens, max_sequences, cache_type, pool, make_device)

    def body() -> None:
        try:
            under_test.engine.run()
        except BaseException as error:  # noqa: BLE001 - reported by whoever waits for an answer
            under_test.failure = error

    thread = threading.Thread(target=body)
    thread.start()
    try:
        yield under_test
    finally:
        under_test.engine.stop()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    if under_test.failure is not None:
        raise under_test.failure
