"""Every operation of `kernels.triton`, also those that are torch's, against float64 or the CPU.

In a dry run the Triton kernels among them run in Triton's interpreter.
"""

import dataclasses
import functools
from collections.abc import Iterator

import torch

from bench.gpu_check import float64
from bench.gpu_check.attention_case import BOUNDS, AttentionRun, poisoned
from bench.gpu_check.cases import AttentionCase, attention_cases
from bench.gpu_check.logits_checks import check_logits
from bench.gpu_check.task import Check, Setting, Task, at_least, at_most, verified
from kernels import reference
from kernels.interface import Kernels, SamplingBatch
from kernels.kv_layout import KvLayout
from kernels.kv_pool import KvPool
from kernels.select import select_kernels

_EPSILON = 1e-5
_SAME_TOKENS = 0.998
"""Share of sampled tokens, all but one of 512: two may come closer to each other than float32 can tell apart."""


def tasks(setting: Setting) -> list[Task]:
    """The section."""
    attention = [
        Task(f"attention, {case.name}", functools.partial(_attention, case=case), limit_s=40)
        for case in attention_cases(setting.dry_run)
    ]
    others = [
        Task("norms", _norms),
        Task("silu_mul", _silu_mul),
        Task("copy_blocks", _copy_blocks),
        Task("sampling", _sampling, limit_s=40),
        Task("logits", lambda setting: check_logits(setting, _kernels(setting)), limit_s=40),
        Task("linear", _linear),
    ]
    # What is worth most first: whatever serves the commonest model.
    return attention[:2] + others + attention[2:]


def _kernels(setting: Setting) -> Kernels:
    return select_kernels("triton-interpret" if setting.dry_run else "triton")


def _attention(setting: Setting, case: AttentionCase) -> Iterator[Check]:
    yield from AttentionRun(case, setting.device, setting.rng(case.name)).checks(_kernels(setting))


def _dtypes(setting: Setting) -> list[str]:
    # The interpreter multiplies bfloat16 matrices wrongly.
    return ["float32", "float16"] if setting.dry_run else ["bfloat16", "float16", "float32"]


def _normal(setting: Setting, name: str, *shape: int) -> torch.Tensor:
    generator = torch.Generator(setting.device).manual_seed(setting.rng(name).randrange(1 << 62))
    return torch.randn(*shape, generator=generator, device=setting.device)


def _norms(setting: Setting) -> Iterator[Check]:
    kernels = _kernels(setting)
    rows, hidden, heads = (3, 96, 5) if setting.dry_run else (257, 4096, 40)
    for dtype in _dtypes(setting):
        kind: torch.dtype = getattr(torch, dtype)
        x, residual = _normal(setting, f"norm {dtype}", 2, rows, hidden).to(kind)
        weight = _normal(setting, "weight", hidden).to(kind)
        with poisoned():
            out = kernels.rms_norm(x, weight, _EPSILON)
        expected = reference.rms_norm(x.double(), weight.double(), _EPSILON)
        yield at_most(f"rms_norm {dtype}", float64.relative_error(out, expected), BOUNDS[dtype])

        qkv = _normal(setting, f"heads {dtype}", rows, heads + 3, 64).to(kind)
        head_weight = _normal(setting, "head weight", heads, 64).to(kind)
        with poisoned():
            out = kernels.rms_norm(qkv[:, :heads], head_weight, _EPSILON)
        expected = reference.rms_norm(qkv[:, :heads].double(), head_weight.double(), _EPSILON)
        yield at_most(f"rms_norm of heads {dtype}", float64.relative_error(out, expected), BOUNDS[dtype])

        total = residual.double() + x.double()
        with poisoned():
            out = kernels.add_rms_norm(x, residual, weight, _EPSILON)
        expected = reference.rms_norm(total, weight.double(), _EPSILON)
        yield at_most(f"add_rms_norm {dtype}", float64.relative_error(out, expected), BOUNDS[dtype])
        yield at_most(f"add_rms_norm {dtype}: residual", float64.relative_error(residual, total), BOUNDS[dtype])


def _silu_mul(setting: Setting) -> Iterator[Check]:
    rows, size = (3, 96) if setting.dry_run else (257, 14_336)
    for dtype in _dtypes(setting):
        gate_up = _normal(setting, f"silu {dtype}", rows, 2 * size).to(getattr(torch, dtype))
        with poisoned():
            out = _kernels(setting).silu_mul(gate_up)
        expected = reference.silu_mul(gate_up.double())
        yield at_most(f"silu_mul {dtype}", float64.relative_error(out, expected), BOUNDS[dtype])


def _linear(setting: Setting) -> Iterator[Check]:
    rows, out_features, in_features = (3, 32, 48) if setting.dry_run else (67, 6144, 4096)
    for dtype in _dtypes(setting):
        kind: torch.dtype = getattr(torch, dtype)
        x, weight = (
            _normal(setting, f"{dtype} {count}", count, in_features).to(kind) for count in (rows, out_features)
        )
        with poisoned():
            out = _kernels(setting).prepare_linear(weight.clone(), None)(x)
        yield at_most(f"linear {dtype}", float64.relative_error(out, x.double() @ weight.double().T), BOUNDS[dtype])


def _copy_blocks(setting: Setting) -> Iterator[Check]:
    """Whole blocks, fp8 with scales, at both ends of a pool of more than 4 GiB (whose middle nobody touches)."""
    layout = KvLayout(1 if setting.dry_run else 32, 2, 16, 64, "float8_e4m3fn")
    count, num_copies = layout.num_blocks(5 << 30), 3 if setting.dry_run else 64
    memory = torch.empty(count * layout.block_bytes, dtype=torch.uint8, device=setting.device)
    pool = KvPool.over(memory, layout, count)
    rng = setting.rng("copies")
    low, high = rng.sample(range(1, 1000), num_copies + 1), rng.sample(range(count - 1000, count), num_copies)
    pairs = [pair if i % 2 else pair[::-1] for i, pair in enumerate(zip(low, high, strict=False))]
    touched = torch.tensor(low + high, device=setting.device)
    generator = torch.Generator(setting.device).manual_seed(rng.randrange(1 << 62))
    for block in touched.tolist():
        pool.raw[block].random_(256, generator=generator)
    expected = {block: pool.raw[block].clone() for block in touched.tolist()}
    expected |= {destination: expected[source] for source, destination in pairs}
    _kernels(setting).copy_blocks(pool, torch.tensor(pairs, device=setting.device))
    wrong = sum(not torch.equal(pool.raw[block], bytes_) for block, bytes_ in expected.items())
    yield verified("copy_blocks", not wrong, f"{wrong} of {len(expected)} blocks differ", "0")


def _sampling(setting: Setting) -> Iterator[Check]:
    rows, vocab = (6, 300) if setting.dry_run else (512, 128_256)
    logits = 3 * _normal(setting, "logits", rows, vocab)
    plain = _sampling_batch(setting, rows, greedy=False, filters=False)
    filtered = _sampling_batch(setting, rows, greedy=False, filters=True)
    typical = torch.linspace(0.1, 1, rows, dtype=torch.float64, device=setting.device)
    for name, greedy, batch in (
        ("greedy", True, _sampling_batch(setting, rows, greedy=True, filters=False)),
        ("sampled", False, plain),
        ("top-k, top-p", False, filtered),
        ("typical-p", False, dataclasses.replace(filtered, typical_p=typical)),
    ):
        with poisoned():
            tokens = _kernels(setting).sample(logits.clone(), batch)
        same = float((tokens == reference.sample(logits, batch)).double().mean())
        yield at_least(f"{name}: same tokens as in float64", same, 1.0 if greedy else _SAME_TOKENS)


def _sampling_batch(setting: Setting, rows: int, greedy: bool, filters: bool) -> SamplingBatch:
    rng = setting.rng("sampling")

    def floats(choices: list[float]) -> torch.Tensor:
        return torch.tensor(rng.choices(choices, k=rows), dtype=torch.float64, device=setting.device)

    def integers(choices: list[int]) -> torch.Tensor:
        return torch.tensor(rng.choices(choices, k=rows), dtype=torch.int64, device=setting.device)

    return SamplingBatch(
        temperature=floats([0.0] if greedy else [0.0, 0.3, 0.8, 1.0, 1.5]),
        top_k=integers([0, 1, 5, 50, 2000] if filters else [0]),
        top_p=floats([0.1, 0.5, 0.9, 0.95, 1.0] if filters else [1.0]),
        min_p=floats([0.0, 0.05, 0.3] if filters else [0.0]),
        seed=integers([rng.randrange(1 << 62) for _ in range(rows)]),
        candidate=integers([0, 1, 7]),
        position=integers([0, 1, 1000]),
        all_greedy=greedy,
        filters=filters,
    )
