"""The gated activation against the specification in float64."""

import pytest
import torch

from kernels import reference
from kernels.triton.silu_mul import silu_mul


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)]
)
@pytest.mark.parametrize("size", [1, 33, 1024, 1536, 3000])
def test_the_first_half_gates_the_second(size: int, dtype: torch.dtype, tolerance: float) -> None:
    gate_up = torch.randn(5, 2 * size, generator=torch.Generator().manual_seed(0)).to(dtype)
    ours = silu_mul(gate_up)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), reference.silu_mul(gate_up.double()), rtol=tolerance, atol=tolerance)


def test_gates_far_from_zero_neither_overflow_nor_vanish() -> None:
    gate_up = torch.tensor([[-80.0, -10.0, 0.0, 80.0, 2.0, 2.0, 2.0, 2.0]])
    torch.testing.assert_close(silu_mul(gate_up), reference.silu_mul(gate_up))


def test_no_tokens_are_no_work() -> None:
    assert silu_mul(torch.empty(0, 64)).shape == (0, 32)
