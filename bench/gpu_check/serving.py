"""End to end: random-weight models of real shapes through gRPC and all three processes."""

import functools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from bench.gpu_check.facts import copy_bandwidth
from bench.gpu_check.load import Clients, Reading
from bench.gpu_check.random_model import LLAMA_1B, LLAMA_8B, TINY, ModelShape, written
from bench.gpu_check.stack import engine_report, serving
from bench.gpu_check.task import Check, Setting, Task, at_least, recorded

_INPUT_TOKENS, _OUTPUT_TOKENS = 256, 192
_LONG_PROMPT = 2048
_PROMISED_BATCH, _LEAST_SHARE = 64, 0.70
_MAX_SEQUENCES = 64


def tasks(setting: Setting) -> list[Task]:
    """The section: what is promised first."""
    shapes = [TINY] if setting.dry_run else [LLAMA_8B, LLAMA_1B]
    return [Task(shape.name, functools.partial(_serve, shape=shape), limit_s=100) for shape in shapes]


def _serve(setting: Setting, shape: ModelShape) -> Iterator[Check]:
    began = time.monotonic()
    memory, pool_size = ("memfd", "64MiB") if setting.dry_run else ("auto", "16GiB")
    with written(shape, setting) as model:
        yield _seconds(f"{shape.name}: writing {shape.weight_bytes / 1e9:.2f} GB of weights", time.monotonic() - began)
        began = time.monotonic()
        flags = {"PAGEKEEPER_MAX_SEQUENCES": str(_MAX_SEQUENCES), "PAGEKEEPER_MAX_CONTEXT_LENGTH": "4096"}
        with serving(setting, model, memory, pool_size, **flags) as server, Clients(server.address) as clients:
            yield _seconds(f"{shape.name}: from start to ready", time.monotonic() - began)
            for batch_size in (4, 1) if setting.dry_run else (_PROMISED_BATCH, 1, 8):
                yield from _decode(setting, shape, clients, model, batch_size)
            yield from _prefix_hit(setting, shape, clients)


def _prompts(setting: Setting, shape: ModelShape, name: str, count: int, length: int) -> list[list[int]]:
    rng = setting.rng(f"{shape.name} {name}")
    return [rng.choices(range(300, shape.vocab_size), k=length) for _ in range(count)]


def _decode(setting: Setting, shape: ModelShape, clients: Clients, model: Path, batch_size: int) -> Iterator[Check]:
    """Requests of one batch at once; the rate is of the time in which all of them decode."""
    name = f"{shape.name}, batch {batch_size}"
    clients.send(_prompts(setting, shape, f"warm up {batch_size}", batch_size, 20), 8)
    prompts = _prompts(setting, shape, str(batch_size), batch_size, _INPUT_TOKENS)
    before = engine_report(model)
    readings = clients.send(prompts, 24 if setting.dry_run else _OUTPUT_TOKENS)
    after = engine_report(model)
    ttft = [reading.ttft_s for reading in readings]
    figure = f"median {statistics.median(ttft) * 1e3:.0f} ms, last {max(ttft) * 1e3:.0f} ms"
    yield recorded(f"{name}: time to first token of {_INPUT_TOKENS} tokens", figure, statistics.median(ttft))
    rate, context_length = steady(readings)
    yield recorded(f"{name}: decoding", f"{rate:,.0f} tokens/s, {batch_size / rate * 1e3:.2f} ms a step", rate)
    steps, waited = after.step_seconds - before.step_seconds, after.manager_wait_seconds - before.manager_wait_seconds
    share = waited / steps if steps else 0.0
    yield recorded(f"{name}: device idle for want of the manager's answer", f"{share:.2%} of {steps:.2f} s", share)
    if setting.dry_run:
        return
    kv_bytes = batch_size * context_length * shape.kv_bytes_a_token
    floor_s = (shape.bytes_read_a_step + kv_bytes) / copy_bandwidth(setting)
    reached = floor_s * rate / batch_size
    figure = f"{reached:.1%}, the floor is {floor_s * 1e3:.2f} ms a step"
    if shape == LLAMA_8B and batch_size == _PROMISED_BATCH:
        yield at_least(f"{name}: share of the bytes-moved floor", reached, _LEAST_SHARE)
    yield recorded(f"{name}: of the bytes-moved floor", figure, reached)


def steady(readings: list[Reading]) -> tuple[float, float]:
    """Tokens a second while every request decodes, and the mean context length meanwhile.

    Raises:
        RuntimeError: there was no such time.
    """
    start, stop = max(r.times[0] for r in readings), min(r.times[-1] for r in readings)
    if start >= stop:
        raise RuntimeError("the requests never decoded all at the same time; ask for more tokens")
    counts = [(sum(t <= start for t in r.times), sum(t <= stop for t in r.times)) for r in readings]
    num_tokens = sum(last - first for first, last in counts)
    lengths = [_INPUT_TOKENS + (first + last) / 2 for first, last in counts]
    return num_tokens / (stop - start), statistics.mean(lengths)


def _prefix_hit(setting: Setting, shape: ModelShape, clients: Clients) -> Iterator[Check]:
    """The same long prompt twice."""
    prompt = _prompts(setting, shape, "long", 1, 256 if setting.dry_run else _LONG_PROMPT)
    (cold,), (warm,) = (clients.send(prompt, 8) for _ in range(2))
    figure = f"{cold.ttft_s * 1e3:.1f} ms, then {warm.ttft_s * 1e3:.1f} ms ({warm.cached_tokens} tokens cached)"
    name = f"{shape.name}: first token of {len(prompt[0])} tokens, cold and cached"
    yield recorded(name, figure, cold.ttft_s / warm.ttft_s)


def _seconds(name: str, seconds: float) -> Check:
    return recorded(name, f"{seconds:.1f} s", seconds)
