"""A gateway of nothing but resubmission: whatever becomes of runners, each request is submitted until it has ended."""

import itertools
import queue
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import grpc

from pagekeeper.common.sockets import CHANNEL_OPTIONS, unix_target
from pagekeeper.v1 import runner_pb2, runner_pb2_grpc
from tests.fakes.runner_process import LIMIT_S

_RECONNECT_S = 0.02
_OPTIONS = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]


@dataclass(eq=False)
class Stream:
    """One request of `num_candidates`, as its client sees it; checks that no token is missing and none comes twice."""

    number: int
    prompt: list[int]
    max_tokens: int
    num_candidates: int
    temperature: float
    attempt: int = 0
    answers: dict[int, list[int]] = field(default_factory=dict)
    recomputed: list[int] = field(default_factory=list)
    """Of each candidate and attempt that has told."""
    refusals: list[runner_pb2.Refusal] = field(default_factory=list)
    live: set[int] = field(default_factory=set)
    ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.live = set(range(self.num_candidates))
        self.answers = {index: [] for index in self.live}

    @property
    def num_tokens(self) -> int:
        return sum(len(tokens) for tokens in self.answers.values())

    def submit(self) -> runner_pb2.ServeRequest:
        self.attempt += 1
        candidates = [
            runner_pb2.Submit.Candidate(index=index, generated_token_ids=self.answers[index])
            for index in sorted(self.live)
        ]
        sampling = runner_pb2.ResolvedSampling(
            top_p=1.0, max_tokens=self.max_tokens, temperature=self.temperature, seed=7
        )
        return runner_pb2.ServeRequest(
            submit=runner_pb2.Submit(
                request=self.number,
                attempt=self.attempt,
                tenant="t",
                prompt_token_ids=self.prompt,
                candidates=candidates,
                sampling=sampling,
            )
        )

    def take(self, output: runner_pb2.SequenceOutput) -> None:
        if output.attempt != self.attempt:
            return
        if output.HasField("refusal"):
            self.refusals.append(output.refusal)
            return
        answer = self.answers[output.candidate]
        if output.token_ids:
            assert output.position == len(answer)
        answer += output.token_ids
        if output.finish_reason:
            self.recomputed.append(output.usage.recomputed_tokens)
            self.live.discard(output.candidate)
            if not self.live:
                self.ended.set()


class ResubmittingGateway:
    """Keeps a stream to the socket of one runner, or of whoever has it after that one.

    Attributes:
        hellos: of every stream there was.
        drains: how often a runner said that it drains.
        streams: that were begun.
    """

    def __init__(self, socket: Path) -> None:
        self._target = unix_target(socket)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._streams: dict[int, Stream] = {}
        self._outbox: queue.SimpleQueue[runner_pb2.ServeRequest | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._call: grpc.Call | None = None
        self._is_ready = False
        self._failure: BaseException | None = None
        self.hellos: list[runner_pb2.RunnerHello] = []
        self.drains = 0
        self._thread = threading.Thread(target=self._run, name="gateway")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        with self._lock:
            self._outbox.put(None)
            if self._call is not None:
                self._call.cancel()
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()
        if self._failure is not None:
            raise self._failure

    def submit(self, prompt: list[int], max_tokens: int, num_candidates: int = 1, temperature: float = 0.0) -> Stream:
        stream = Stream(next(self._numbers), prompt, max_tokens, num_candidates, temperature)
        with self._lock:
            self._streams[stream.number] = stream
            if self._is_ready:
                self._outbox.put(stream.submit())
        return stream

    def cancel(self, stream: Stream) -> None:
        with self._lock:
            self._streams.pop(stream.number, None)
            self._outbox.put(runner_pb2.ServeRequest(cancel=runner_pb2.Cancel(request=stream.number)))

    def abandon(self) -> None:
        """Take the runner for dead: end the stream to it, and begin another one."""
        with self._lock:
            if self._call is not None:
                self._call.cancel()

    def wait(self, streams: Iterable[Stream]) -> list[dict[int, list[int]]]:
        """Their answers, once they have ended."""
        waited = list(streams)
        for stream in waited:
            deadline = time.monotonic() + LIMIT_S
            while not stream.ended.wait(0.1):
                assert self._failure is None, self._failure
                assert time.monotonic() < deadline, f"request {stream.number} has {stream.num_tokens} tokens"
        return [stream.answers for stream in waited]

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                with grpc.insecure_channel(self._target, options=_OPTIONS) as channel:
                    self._serve(channel)
                self._closed.wait(_RECONNECT_S)
        except BaseException as error:  # noqa: BLE001 - raised again where the test waits
            self._failure = error

    def _serve(self, channel: grpc.Channel) -> None:
        with self._lock:
            self._outbox = outbox = queue.SimpleQueue()
            if self._closed.is_set():
                return
            call = self._call = runner_pb2_grpc.RunnerServiceStub(channel).Serve(iter(outbox.get, None))
        try:
            for response in call:
                with self._lock:
                    self._take(response)
        except grpc.RpcError:
            pass
        finally:
            outbox.put(None)
            with self._lock:
                self._call, self._is_ready = None, False

    def _take(self, response: runner_pb2.ServeResponse) -> None:
        match response.WhichOneof("message"):
            case "hello":
                self.hellos.append(response.hello)
                self._is_ready = True
                for stream in self._streams.values():
                    self._outbox.put(stream.submit())
            case "draining":
                self.drains += 1
            case "step":
                for output in response.step.outputs:
                    stream = self._streams.get(output.request)
                    if stream is not None:
                        stream.take(output)
                        if stream.ended.is_set():
                            del self._streams[stream.number]
