"""GGUF's tensor types against the package that defines them."""

import gguf
import numpy as np
import pytest
import torch

from model_runner.model.weights.quantization import widen
from pagekeeper.common.gguf.tensor_types import TENSOR_TYPES


@pytest.mark.parametrize("number", sorted(TENSOR_TYPES))
def test_bytes_become_the_numbers_that_the_format_means(number: int) -> None:
    """Bit for bit over random bytes, which include every scale, infinities and NaN."""
    ours, theirs = TENSOR_TYPES[number], gguf.GGMLQuantizationType(number)
    assert (ours.name, ours.block_values, ours.block_bytes) == (theirs.name, *gguf.GGML_QUANT_SIZES[theirs])
    raw = np.random.default_rng(number).integers(0, 256, (97, ours.block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, theirs).astype(np.float32)
    values = widen(ours, torch.from_numpy(raw)).float().numpy()
    np.testing.assert_array_equal(values, expected.reshape(97, ours.block_values))
