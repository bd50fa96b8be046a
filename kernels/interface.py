"""What a kernel backend offers, and the batch it works on.

A backend is a module with the functions of `Kernels`: `kernels.reference` is the specification, every other one must
match it up to the order of float summation. Tensors live on the device of the pool (see `kernels.kv_pool`).
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.kv_pool import KvPool

PADDING_SLOT = -1
"""Slot of a token that fills a batch up to the size of a captured graph: its K and V are stored nowhere."""


@dataclass(frozen=True)
class AttentionBatch:
    """Where the tokens of one step live in the pool. Sequences with one new token (decode) come first.

    The tensors are int64 and live on the device of the pool. Valid for one step; a captured graph is replayed with
    other values in the same tensors, so kernels take lengths from the tensors and only upper bounds from the lists.
    """

    slot_mapping: torch.Tensor
    """[tokens]: slot that each new token's K and V go to, or PADDING_SLOT."""
    block_tables: torch.Tensor
    """[sequences, max_blocks]: block ids, padded with the null block."""
    query_starts: torch.Tensor
    """[sequences + 1]: row of each sequence's first new token; the last entry is `tokens`."""
    context_ends: torch.Tensor
    """[sequences]: tokens of each sequence whose K and V exist once this step's are stored, new ones included.

    0 for a sequence that pads a captured graph; its output is undefined.
    """
    query_lengths: list[int]
    """New tokens of each sequence; their sum is `tokens`. Host side."""
    context_lengths: list[int]
    """`context_ends` on the host; in a captured graph upper bounds of them."""
    num_decodes: int
    """The first so many sequences have exactly one new token."""
    shared_blocks: torch.Tensor | None = None
    """[1]: leading entries that the block tables of all decodes have in common, to be read once for all of them.

    Whole blocks before each decode's new token. None: nobody has looked, or it does not pay. A hint: results are the
    same up to the order of float summation.
    """


@dataclass(frozen=True)
class AttentionParams:
    """How scores are made; the same for every step of a layer."""

    scale: float
    """Factor of the dot products."""
    sliding_window: int | None = None
    """A token sees the last so many tokens, itself included; None: all."""
    soft_cap: float | None = None
    """A scaled score s becomes `soft_cap * tanh(s / soft_cap)`; None: unchanged."""


@dataclass(frozen=True)
class SamplingBatch:
    """How the next token is chosen, one entry for each row of logits. Tensors on the logits' device.

    Tokens race: each arrives after an exponentially distributed time divided by its weight, and the first to arrive is
    chosen. That is the softmax's distribution, and the same as the largest sum of logit and Gumbel noise. A token's
    time depends on no other token, so a rounding error of the logits changes a choice only if the first two arrive
    as close together as that.

    A draw has a key, words 0 (high) and 1 of Philox4x32-10 with key (low, high word of seed) and counter (position,
    candidate, 0, 0), so it does not depend on what else is in the batch (Salmon et al., SC'11). The numbers that
    SplitMix64 gives if it begins with the key (Steele et al., OOPSLA 2014) are cut in halves, lower half first: one for
    each token. As a signed integer k it makes the time -log(1/2 - (2 k + 1) / 2**33). So a token of probability p is
    chosen as often as it should be but for a share of about 2**-33 / p, and one below 1e-11 hardly ever.
    """

    temperature: torch.Tensor
    """[rows] float64; 0: the likeliest token, the first of equals."""
    top_k: torch.Tensor
    """[rows] int64: only so many of the likeliest are kept, the first of equals; 0 or at least vocab: all."""
    top_p: torch.Tensor
    """[rows] float64: of those, likeliest first, only as many as are needed to reach this share are kept; 1: all."""
    min_p: torch.Tensor
    """[rows] float64: of those, only what is at least this share of the likeliest is kept; 0: all."""
    seed: torch.Tensor
    """[rows] int64: 64 bits."""
    candidate: torch.Tensor
    """[rows] int64: 32 bits."""
    position: torch.Tensor
    """[rows] int64: 32 bits."""
    all_greedy: bool
    """Every temperature is 0. Host side."""
    filters: bool
    """Some top_k, top_p or min_p keeps less than all. Host side."""
    typical_p: torch.Tensor | None = None
    """[rows] float64: of those, only the tokens whose surprise, minus the logarithm of what is left of the probability,
    is nearest to the expected one, as many as are needed to reach this share, are kept; 1: all. None: all of all rows.
    (Meister et al., 2022.)
    """


@dataclass(frozen=True)
class Penalties:
    """Tokens that become less likely because they stand in the text already."""

    rows: torch.Tensor
    """[penalised] int64: the rows of logits that have penalties."""
    repetition: torch.Tensor
    """[penalised] float64: divides a positive logit and multiplies another; 1: off."""
    presence: torch.Tensor
    """[penalised] float64: taken off the logit of what the answer has; 0: off."""
    frequency: torch.Tensor
    """[penalised] float64: taken off as often as the answer has it; 0: off."""
    owners: torch.Tensor
    """[entries] int64: which of `rows` the entry is about."""
    token_ids: torch.Tensor
    """[entries] int64. The last entries, one for each of `rows`, replace an earlier one of the same token."""
    counts: torch.Tensor
    """[entries] int64: how often the answer has the token; 0: only the prompt has it."""


@dataclass(frozen=True)
class LogitEdits:
    """What is done to logits before a token is chosen, in this order. Tensors on the logits' device; None: nothing.

    The penalties come first, as the sign of the model's own logit decides what the one for repetition does; bans come
    last, so that nothing lifts them.
    """

    penalties: Penalties | None = None
    bias: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    """Row and token, int64, and what is added to its logit, float64; no token of a row twice."""
    allowed: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    """[n] int64: rows of which only some tokens are allowed; then row and token of each that is."""
    banned: tuple[torch.Tensor, torch.Tensor] | None = None
    """Row and token, int64."""


@dataclass(frozen=True)
class Logprobs:
    """Natural logarithms of the softmax of some rows of logits."""

    chosen: torch.Tensor
    """[rows, tokens] float64: of the tokens asked about."""
    ranks: torch.Tensor
    """[rows, tokens] int64: one more than the number of likelier tokens."""
    top_token_ids: torch.Tensor
    """[rows, n] int64: the likeliest tokens, likeliest first, of equals the lower id."""
    top: torch.Tensor
    """[rows, n] float64: theirs."""


class Linear(Protocol):
    """A linear layer whose weights a backend has arranged for itself."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x [tokens, in] @ weight.T + bias`, as a new tensor `[tokens, out]`."""
        ...


class PagedAttention(Protocol):
    """Causal attention of one step's tokens over their sequences' paged context; valid for that step."""

    def rotate_and_store(self, layer: int, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotate Q and K of the new tokens in place, then write K and V into their slots of the pool.

        Args:
            layer: of the pool.
            qkv: [tokens, num_heads + 2 * num_kv_heads, head_dim], Q, K, V; its V stays as it is.
            cos: [tokens, head_dim].
            sin: [tokens, head_dim], the first half negated. Pairs are (i, i + head_dim / 2): a rotated head is
                `x * cos + x rolled by half of head_dim * sin`.
        """
        ...

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Attention of `query [tokens, num_heads, head_dim]`, to be called after `rotate_and_store`.

        Returns a new tensor of the same shape. A token sees its own sequence's tokens up to itself, of those the
        last `sliding_window` if that is set. What unused slots hold, NaN included, has no influence on a single bit.
        """
        ...


class Kernels(Protocol):
    """The operations of the model. Tensors live on one device; nothing is kept between calls."""

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Arrange `weight [out, in]` and `bias [out]` once, at load; the arguments are not needed afterwards."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """`x / sqrt(mean(x²) + epsilon) * weight` over the last dimension; `weight` may broadcast over heads.

        The heads of `x [tokens, heads, head_dim]` may be some of more: only its last two dimensions are contiguous.
        """
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """Add `x` to `residual` in place and return `rms_norm` of the sum; all `[tokens, hidden_size]`."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up` of `gate_up [tokens, 2 * size]`, gate first, as a new tensor `[tokens, size]`."""
        ...

    def prepare_attention(self, batch: AttentionBatch, kv_pool: KvPool, params: AttentionParams) -> PagedAttention:
        """Derive once a step what every layer's attention needs.

        Raises:
            ValueError: this backend has no kernels for the pool's dtype or shape.
        """
        ...

    def copy_blocks(self, kv_pool: KvPool, copies: torch.Tensor) -> None:
        """Copy whole blocks inside the pool: `copies [n, 2]` int64 holds (source, destination).

        No destination is named twice or is a source of another copy, so their order does not matter.
        """
        ...

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """Choose a token id for each row of `logits [rows, vocab]` float32, finite but for -inf; `[rows]` int64."""
        ...

    def edit_logits(self, logits: torch.Tensor, edits: LogitEdits) -> None:
        """Change `logits [rows, vocab]` float32 in place, worked out in float64."""
        ...

    def logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> Logprobs:
        """How likely `logits [rows, vocab]` float32 make `token_ids [rows, tokens]`, and the likeliest `num_top`.

        All, of a vocabulary that has fewer. Besides the result it takes memory for a bounded number of rows only.
        """
        ...
