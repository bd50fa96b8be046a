"""What the device's sections make of their measurements, on tiny shapes with times that are made up."""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu_check import bandwidth, serving
from bench.gpu_check.decode_step import TOKEN_BYTES, DecodeShape, DecodeStep, random_bytes
from bench.gpu_check.facts import COPY_BANDWIDTH
from bench.gpu_check.load import Reading
from bench.gpu_check.random_model import LLAMA_8B
from bench.gpu_check.task import Check, NotRunError, Setting
from kernels import reference
from pagekeeper.v1 import runner_pb2

SHAPE = DecodeShape(2, 64)
OURS_S = SHAPE.layer_bytes / (0.86 * 1e12)
SETTING = Setting(dry_run=True, seed=1, end=math.inf, facts={COPY_BANDWIDTH: 1e12})


def by_name(checks: Sequence[Check]) -> dict[str, Check]:
    assert len({check.name for check in checks}) == len(checks)
    return {check.name: check for check in checks}


@pytest.fixture
def _made_up_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours takes as long as the promised share of copy bandwidth allows, SDPA 4 % less."""

    def per_call_s(calls: Sequence[Callable[[], torch.Tensor]], repeats: int = 15) -> float:
        return OURS_S if calls[0]().ndim == 3 else OURS_S / 1.04

    monkeypatch.setattr(bandwidth, "per_call_s", per_call_s)
    monkeypatch.setattr(bandwidth, "select_kernels", lambda _: reference)


@pytest.mark.usefixtures("_made_up_times")
def test_the_promised_decode_shape_is_held_against_both_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "_PROMISED", SHAPE)
    checks = by_name(list(bandwidth._decode(SETTING, SHAPE, lambda: random_bytes(8 << 20, "cpu"))))
    share = checks[f"decode, {SHAPE}: share of copy bandwidth"]
    cost = checks[f"decode, {SHAPE}: cost of the block table"]
    assert (share.result, share.value) == ("pass", pytest.approx(0.86))
    assert (cost.result, cost.value) == ("pass", pytest.approx(0.04))


@pytest.mark.usefixtures("_made_up_times")
def test_a_prefill_agrees_with_sdpa_and_counts_half_the_square() -> None:
    checks = by_name(list(bandwidth._prefill(SETTING, 64)))
    assert checks["prefill of 64: differs from SDPA's"].result == "pass"
    assert checks["prefill of 64: block table"].value == pytest.approx(4 * 32 * 128 * 64**2 / 2 / OURS_S)


def test_without_a_bandwidth_there_is_nothing_to_compare_with() -> None:
    setting = Setting(dry_run=True, seed=1, end=math.inf)
    with pytest.raises(NotRunError, match="facts"):
        list(bandwidth._decode(setting, SHAPE, lambda: random_bytes(8 << 20, "cpu")))


def test_a_decode_step_reads_every_byte_it_counts_and_no_block_twice() -> None:
    step = DecodeStep(random_bytes(8 << 20, "cpu"), SHAPE)
    ids = step.tables.flatten().tolist()
    assert len(set(ids)) == len(ids)
    assert 0 not in ids
    assert max(ids) < len(step.pool.raw)
    assert SHAPE.layer_bytes == 2 * 64 * TOKEN_BYTES
    with pytest.raises(ValueError, match="GiB for one layer"):
        DecodeStep(random_bytes(1 << 16, "cpu"), SHAPE)


class _Clients:
    """Answers at 2 ms a step."""

    def send(self, prompts: Sequence[list[int]], max_tokens: int) -> list[Reading]:
        began = time.monotonic()
        times = [began + 0.1 + 0.002 * i for i in range(max_tokens)]
        return [Reading(began, times, cached_tokens=0) for _ in prompts]


def test_end_to_end_rates_are_held_against_the_bytes_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "engine_report", lambda _: runner_pb2.EngineReport(step_seconds=1.0))
    setting = Setting(dry_run=False, seed=1, end=math.inf, facts={COPY_BANDWIDTH: 15e12})
    clients: Any = _Clients()
    checks = by_name(list(serving._decode(setting, LLAMA_8B, clients, Path(), 64)))
    reached = checks["llama-8b, batch 64: share of the bytes-moved floor"]
    context = 256 + (1 + 192) / 2
    floor_s = (LLAMA_8B.bytes_read_a_step + 64 * context * LLAMA_8B.kv_bytes_a_token) / 15e12
    assert reached.value == pytest.approx(floor_s / 0.002, rel=0.02)
    assert reached.result == ("pass" if reached.value >= 0.7 else "fail")
    assert checks["llama-8b, batch 64: time to first token of 256 tokens"].value == pytest.approx(0.1)
