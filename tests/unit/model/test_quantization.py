"""GGUF's tensor types against the package that defines them."""

import gguf
import numpy as np
import pytest
import torch

from model_runner.model.weights.quantization import TENSOR_TYPES


@pytest.mark.parametrize("number", sorted(TENSOR_TYPES))
def test_bytes_become_the_numbers_that_the_format_means(number: int) -> None:
    kind = TENSOR_TYPES[number]
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] == (kind.block_values, kind.block_bytes)
    rows = np.random.default_rng(0).standard_normal((7, 96)).astype(np.float32)
    raw = gguf.quants.quantize(rows, gguf.GGMLQuantizationType[kind.name])
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind.name]).astype(np.float32)
    blocks = torch.from_numpy(raw.view(np.uint8).copy()).view(-1, kind.block_bytes)
    values = kind.widen(blocks).float().view(7, 96)
    torch.testing.assert_close(values, torch.from_numpy(expected), rtol=1e-6, atol=1e-6)
