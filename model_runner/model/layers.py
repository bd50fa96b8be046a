"""One layer of the decoder: attention and feed-forward, each behind a norm and added to the residual stream.

An addition is left to the norm after it, which reads the stream anyway.
"""

from dataclasses import dataclass

import torch

from kernels.interface import Kernels, Linear, PagedAttention
from model_runner.model.config import ModelConfig
from model_runner.model.weights.source import WeightSource


@dataclass(frozen=True)
class Rotation:
    """Cosines and half-negated sines of the step's positions, `[tokens, head_dim]` each."""

    cos: torch.Tensor
    sin: torch.Tensor


class Attention:
    """Grouped-query attention with rotary positions; Q, K and V come from one linear layer."""

    def __init__(self, layer: int, config: ModelConfig, weights: WeightSource, kernels: Kernels) -> None:
        prefix = f"model.layers.{layer}.self_attn"
        hidden, q_size = config.hidden_size, config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        sizes = {f"{prefix}.q_proj": q_size, f"{prefix}.k_proj": kv_size, f"{prefix}.v_proj": kv_size}
        self._layer = layer
        self._num_heads = config.num_heads
        self._num_kv_heads = config.num_kv_heads
        self._head_dim = config.head_dim
        self._epsilon = config.rms_norm_epsilon
        self._kernels = kernels
        self._qkv = take_linear(weights, kernels, sizes, hidden, config.qkv_bias)
        self._output = take_linear(weights, kernels, {f"{prefix}.o_proj": hidden}, q_size, config.output_bias)
        self._qk_norm: torch.Tensor | None = None  # [num_heads + num_kv_heads, head_dim]
        if config.qk_norm:
            q_norm = weights.take(f"{prefix}.q_norm.weight", config.head_dim)
            k_norm = weights.take(f"{prefix}.k_norm.weight", config.head_dim)
            self._qk_norm = torch.cat((q_norm.expand(config.num_heads, -1), k_norm.expand(config.num_kv_heads, -1)))

    def forward(self, x: torch.Tensor, rotation: Rotation, attention: PagedAttention) -> torch.Tensor:
        """The attention of `x`, both `[tokens, hidden_size]`."""
        heads, kv_heads = self._num_heads, self._num_kv_heads
        qkv = self._qkv(x).view(-1, heads + 2 * kv_heads, self._head_dim)
        if self._qk_norm is not None:
            qk = qkv[:, : heads + kv_heads]
            qk.copy_(self._kernels.rms_norm(qk, self._qk_norm, self._epsilon))
        attention.rotate_and_store(self._layer, qkv, rotation.cos, rotation.sin)
        out = attention.attend(self._layer, qkv[:, :heads])
        return self._output(out.flatten(1))


class FeedForward:
    """The gated feed-forward layer; gate and up come from one linear layer."""

    def __init__(self, layer: int, config: ModelConfig, weights: WeightSource, kernels: Kernels) -> None:
        prefix = f"model.layers.{layer}.mlp"
        hidden, size, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        sizes = {f"{prefix}.gate_proj": size, f"{prefix}.up_proj": size}
        self._kernels = kernels
        self._gate_up = take_linear(weights, kernels, sizes, hidden, bias)
        self._down = take_linear(weights, kernels, {f"{prefix}.down_proj": hidden}, size, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The feed-forward of `x`, both `[tokens, hidden_size]`."""
        return self._down(self._kernels.silu_mul(self._gate_up(x)))


class DecoderLayer:
    """Attention, then feed-forward."""

    def __init__(self, layer: int, config: ModelConfig, weights: WeightSource, kernels: Kernels) -> None:
        prefix = f"model.layers.{layer}"
        self._epsilon = config.rms_norm_epsilon
        self._kernels = kernels
        self._input_norm = weights.take(f"{prefix}.input_layernorm.weight", config.hidden_size)
        self._attention = Attention(layer, config, weights, kernels)
        self._post_norm = weights.take(f"{prefix}.post_attention_layernorm.weight", config.hidden_size)
        self._feed_forward = FeedForward(layer, config, weights, kernels)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor, rotation: Rotation, attention: PagedAttention
    ) -> torch.Tensor:
        """What this layer adds to the residual stream last, `[tokens, hidden_size]`.

        Args:
            x: what the layer before returned.
            residual: the stream before `x` is added; this layer adds it in place, and what its attention makes of it.
            rotation: of the step.
            attention: of the step.
        """
        kernels = self._kernels
        normed = kernels.add_rms_norm(x, residual, self._input_norm, self._epsilon)
        x = self._attention.forward(normed, rotation, attention)
        return self._feed_forward.forward(kernels.add_rms_norm(x, residual, self._post_norm, self._epsilon))


def take_linear(
    weights: WeightSource, kernels: Kernels, sizes: dict[str, int], in_features: int, has_bias: bool
) -> Linear:
    """One linear layer out of the layers named in `sizes` (name: out features), one below the other."""
    weight = torch.cat([weights.take(f"{name}.weight", size, in_features) for name, size in sizes.items()])
    bias = torch.cat([weights.take(f"{name}.bias", size) for name, size in sizes.items()]) if has_bias else None
    return kernels.prepare_linear(weight, bias)
