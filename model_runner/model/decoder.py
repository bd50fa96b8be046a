"""The decoder of the Llama family: token ids in, logits out, K and V in the paged pool."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from kernels.interface import AttentionBatch, AttentionParams, Kernels
from kernels.kv_pool import KvPool
from model_runner.model.config import ModelConfig
from model_runner.model.layers import DecoderLayer, Rotation
from model_runner.model.rotary import RotaryEmbedding, take_divisors
from model_runner.model.weights.names import EMBEDDING, FINAL_NORM, HEAD
from model_runner.model.weights.source import WeightSource
from pagekeeper.common.errors import ConfigurationError


class Hidden(NamedTuple):
    """What the layers make of tokens: the sum of both, [tokens, hidden_size] each, is still to be made."""

    x: torch.Tensor
    residual: torch.Tensor


class Decoder:
    """Embedding, layers, final norm and head. Keeps nothing between calls.

    Attributes:
        vocab_size: logits of a token.

    Args:
        config: the shape.
        weights: every parameter is taken out of it.
        kernels: the operations.

    Raises:
        ConfigurationError: a tensor is missing or has a wrong shape.
    """

    def __init__(self, config: ModelConfig, weights: WeightSource, kernels: Kernels) -> None:
        hidden, vocab = config.hidden_size, config.vocab_size
        self.vocab_size = vocab
        self._kernels = kernels
        self._epsilon = config.rms_norm_epsilon
        self._scale = config.head_dim**-0.5
        self._windows = config.sliding_windows
        divisors = take_divisors(weights, config.rope, config.head_dim)
        self._embedding = weights.take(EMBEDDING, vocab, hidden)
        self._rotary = RotaryEmbedding(config.rope, config.head_dim, divisors, self._embedding.device)
        self._layers = [DecoderLayer(i, config, weights, kernels) for i in range(config.num_layers)]
        self._norm = weights.take(FINAL_NORM, hidden)
        head = self._embedding
        if HEAD in weights or not config.tied_head:
            head = weights.take(HEAD, vocab, hidden)
            if config.tied_head and not torch.equal(head, self._embedding):
                raise ConfigurationError(f"weights: {HEAD} differs from the embedding it is tied to")
        self._head = kernels.prepare_linear(head, None)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: AttentionBatch,
        kv_pool: KvPool,
        logit_rows: torch.Tensor,
        logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run one step: `hidden`, then `logits` of the rows asked for."""
        return self.logits(self.hidden(token_ids, positions, batch, kv_pool), logit_rows, logits)

    @torch.inference_mode()
    def hidden(
        self, token_ids: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch, kv_pool: KvPool
    ) -> Hidden:
        """Store K and V of the step's tokens in the pool, and return what the layers make of these.

        Args:
            token_ids: [tokens] int64, sequence after sequence in the order of `batch`.
            positions: [tokens] int64, of each token in its sequence, from 0.
            batch: where the tokens live in the pool.
            kv_pool: where K and V live.
        """
        rotation = Rotation(*self._rotary.angles(positions))
        attentions = {
            window: self._kernels.prepare_attention(batch, kv_pool, AttentionParams(self._scale, window))
            for window in set(self._windows)
        }
        x = F.embedding(token_ids, self._embedding)
        residual = torch.zeros_like(x)
        for layer, window in zip(self._layers, self._windows, strict=True):
            x = layer.forward(x, residual, rotation, attentions[window])
        return Hidden(x, residual)

    @torch.inference_mode()
    def logits(self, hidden: Hidden, rows: torch.Tensor, logits: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of some tokens of a step.

        Args:
            hidden: of all its tokens.
            rows: [rows] int64, indices of tokens.
            logits: [rows, vocab_size] float32, to be written and returned; None: a new tensor.

        Returns:
            [rows, vocab_size] float32; an inference tensor, so change it in place only under inference mode.
        """
        x = self._kernels.add_rms_norm(hidden.x[rows], hidden.residual[rows], self._norm, self._epsilon)
        found = self._head(x)
        return found.float() if logits is None else logits.copy_(found)
