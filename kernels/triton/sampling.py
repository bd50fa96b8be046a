"""Choosing the next token: greedy, or at random from what top_k, top_p and min_p keep.

A row is cut into chunks, so that one row alone occupies many multiprocessors:

1. the best token of each chunk: one pass over the logits, all that a greedy row costs;
2. if something is filtered, the lowest token that is kept: one program a row, which reads it over and over (see
   `kernels.triton.sampling_filters`);
3. the winner of each chunk, if something is drawn: a second pass, over logits that lie in the L2 cache by now;
4. the best, or the winner, of the row.

Arithmetic: float32. The logarithm of what a token of weight exp(-a) scores is off by at most (4 a + 12) 2**-24. So
another token than the reference's wins only if the two best come as close as that, which over any distribution of 2**18
tokens they do in fewer than one draw of 150,000. top_p adds up to 256 weights in float32 before it goes on in float64,
and keeps other tokens only if the share of what it keeps comes as close as 1e-5 to the limit. What top_k and min_p keep
is exact.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from kernels.interface import SamplingBatch
from kernels.triton.compile_spec import CompileSpec
from kernels.triton.noise import draw_key, exponential, token_bits
from kernels.triton.sampling_filters import lowest_kept
from kernels.triton.sampling_typical import drop_atypical
from kernels.triton.token_order import factor_of, index_of, token_key, value_of

if TYPE_CHECKING:
    from triton.runtime.jit import JITFunction

_CHUNK = 4096
_CHUNK_WARPS = 8
_ROW_WARPS = 16


@triton.jit
def _best_of_chunk(best, logits, vocab, row_stride, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row * row_stride + index, mask=index < vocab, other=float("-inf"))
    tl.store(best + row * tl.num_programs(1) + chunk, tl.max(token_key(values, index), 0))


@triton.jit
def _best_of_row(best, row, num_chunks, CHUNKS: tl.constexpr):
    chunk = tl.arange(0, CHUNKS)
    keys = tl.load(best + row * num_chunks + chunk, mask=chunk < num_chunks, other=-0x7FFFFFFFFFFFFFFF)
    return tl.max(keys, 0)


@triton.jit
def _lowest_of_row(
    lowest, best, logits, temperature, top_k, top_p, min_p, vocab, row_stride, num_chunks, CHUNKS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    row_temperature = tl.load(temperature + row)
    if row_temperature > 0:
        row_best = _best_of_row(best, row, num_chunks, CHUNKS)
        row_logits = logits + row * row_stride
        k, p, least = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
        tl.store(lowest + row, lowest_kept(row_logits, vocab, row_best, row_temperature, k, p, least))


@triton.jit
def _winner_of_chunk(
    winners,
    best,
    lowest,
    logits,
    temperature,
    seed,
    candidate,
    position,
    vocab,
    row_stride,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    num_chunks = tl.num_programs(1)
    row_temperature = tl.load(temperature + row)
    winner = tl.load(best + row * num_chunks + chunk)
    if row_temperature > 0:
        highest = value_of(_best_of_row(best, row, num_chunks, CHUNKS))
        key = draw_key(tl.load(seed + row), tl.load(candidate + row), tl.load(position + row))
        index = chunk * CHUNK + tl.arange(0, CHUNK)
        values = tl.load(logits + row * row_stride + index, mask=index < vocab, other=float("-inf"))
        scores = (values - highest) * factor_of(row_temperature) - tl.log2(exponential(token_bits(key, index)))
        if lowest is not None:
            scores = tl.where(token_key(values, index) >= tl.load(lowest + row), scores, float("-inf"))
        winner = tl.max(token_key(scores, index), 0)
    tl.store(winners + row * num_chunks + chunk, winner)


@triton.jit
def _token_of_row(tokens, keys, num_chunks, CHUNKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tl.store(tokens + row, index_of(_best_of_row(keys, row, num_chunks, CHUNKS)).to(tl.int64))


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Choose one token id for each row of `logits [rows, vocab]` float32; see `kernels.interface.Kernels`.

    Two launches if all rows are greedy, three if nothing is filtered, else four; nothing waits for the host. Only a
    typical_p costs more.
    """
    logits, batch = drop_atypical(logits, batch)
    rows, vocab = logits.shape
    row_stride = logits.stride(0)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return tokens
    num_chunks = triton.cdiv(vocab, _CHUNK)
    chunks = triton.next_power_of_2(num_chunks)
    best = torch.empty(rows, num_chunks, dtype=torch.int64, device=logits.device)
    _best_of_chunk[rows, num_chunks](best, logits, vocab, row_stride, CHUNK=_CHUNK, num_warps=_CHUNK_WARPS)
    keys, lowest = best, None
    if not batch.all_greedy:
        if batch.filters:
            lowest = torch.empty_like(tokens)
            _lowest_of_row[rows,](
                lowest,
                best,
                logits,
                batch.temperature,
                batch.top_k,
                batch.top_p,
                batch.min_p,
                vocab,
                row_stride,
                num_chunks,
                CHUNKS=chunks,
                num_warps=_ROW_WARPS,
            )
        keys = torch.empty_like(best)
        _winner_of_chunk[rows, num_chunks](
            keys,
            best,
            lowest,
            logits,
            batch.temperature,
            batch.seed,
            batch.candidate,
            batch.position,
            vocab,
            row_stride,
            CHUNK=_CHUNK,
            CHUNKS=chunks,
            num_warps=_CHUNK_WARPS,
        )
    _token_of_row[rows,](tokens, keys, num_chunks, CHUNKS=chunks, num_warps=1)
    return tokens


_TYPES = {
    "tokens": "*i64",
    "best": "*i64",
    "winners": "*i64",
    "keys": "*i64",
    "lowest": "*i64",
    "logits": "*fp32",
    "temperature": "*fp64",
    "top_k": "*i64",
    "top_p": "*fp64",
    "min_p": "*fp64",
    "seed": "*i64",
    "candidate": "*i64",
    "position": "*i64",
    "vocab": "i32",
    "row_stride": "i32",
    "num_chunks": "i32",
}


def compile_specs() -> Iterator[CompileSpec]:
    """The kernels for greedy, plain and filtered sampling, for a vocabulary of 32,000 and one of 262,144 tokens."""
    yield _spec("best_of_chunk", _best_of_chunk, {"CHUNK": _CHUNK}, wide_loads=True)
    for chunks in (8, 64):
        size = {"CHUNKS": chunks}
        both = size | {"CHUNK": _CHUNK}
        name = f"chunks={chunks}"
        yield _spec(f"lowest_of_row {name}", _lowest_of_row, size, num_warps=_ROW_WARPS)
        yield _spec(f"winner_of_chunk plain {name}", _winner_of_chunk, both | {"lowest": None}, wide_loads=True)
        yield _spec(f"winner_of_chunk filtered {name}", _winner_of_chunk, both, wide_loads=True)
        yield _spec(f"token_of_row {name}", _token_of_row, size, num_warps=1)


def _spec(
    name: str,
    kernel: "JITFunction[Any]",
    constants: dict[str, Any],
    *,
    num_warps: int = _CHUNK_WARPS,
    wide_loads: bool = False,
) -> CompileSpec:
    run_time = [argument for argument in kernel.arg_names if argument not in constants]
    return CompileSpec(
        name=f"sampling {name}",
        kernel=kernel,
        signature={argument: _TYPES[argument] for argument in run_time},
        constants=constants,
        divisible_by_16=tuple({"vocab", "row_stride"}.intersection(run_time)),
        num_warps=num_warps,
        wide_loads=wide_loads,
    )
