"""Norms against the specification, in float64, with NaN wherever a kernel must not look."""

import pytest
import torch

from kernels import reference
from kernels.triton.rms_norm import add_rms_norm, rms_norm

DTYPES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
EPSILON = 1e-5


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


def close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = DTYPES[ours.dtype]
    torch.testing.assert_close(ours.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 48, 576, 1000, 3072, 5120, 16384])
def test_rows_of_any_size_are_normalised(size: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, size).to(dtype), torch.randn(size).to(dtype)
    ours = rms_norm(x, weight, EPSILON)
    assert ours.dtype == dtype
    close(ours, reference.rms_norm(x.double(), weight.double(), EPSILON))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 64), (6, 64), (9, 80), (40, 128), (7, 96), (3, 256), (2, 1500)])
def test_heads_that_are_some_of_more_have_weights_of_their_own(heads: int, head_dim: int, dtype: torch.dtype) -> None:
    every_head = torch.full((3, heads + 2, head_dim), float("nan"), dtype=dtype)
    every_head[:, :heads] = torch.randn(3, heads, head_dim)
    x, weight = every_head[:, :heads], torch.randn(heads, head_dim).to(dtype)
    close(rms_norm(x, weight, EPSILON), reference.rms_norm(x.double(), weight.double(), EPSILON))
    shared = rms_norm(x, weight[0], EPSILON)
    assert shared.is_contiguous()
    close(shared, reference.rms_norm(x.double(), weight[0].double(), EPSILON))
    assert every_head[:, heads:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 576, 2048, 5120])
def test_the_residual_takes_the_sum_and_the_norm_is_of_what_it_holds(size: int, dtype: torch.dtype) -> None:
    x, residual, weight = (torch.randn(4, size).to(dtype) for _ in range(3))
    before, weight = residual.clone(), weight[0]
    ours = add_rms_norm(x, residual, weight, EPSILON)
    # The interpreter cuts numbers off to bfloat16 where a device rounds them.
    torch.testing.assert_close(residual, before + x, rtol=2**-7 if dtype == torch.bfloat16 else 0, atol=0)
    close(ours, reference.rms_norm(residual.double(), weight.double(), EPSILON))


def test_rows_close_to_zero_are_held_up_by_epsilon() -> None:
    x, weight = torch.full((2, 64), 1e-20), torch.ones(64)
    close(rms_norm(x, weight, EPSILON), reference.rms_norm(x.double(), weight.double(), EPSILON))
    assert rms_norm(torch.zeros(2, 64), weight, EPSILON).count_nonzero() == 0


def test_no_tokens_are_no_work() -> None:
    assert rms_norm(torch.empty(0, 3, 64), torch.ones(64), EPSILON).shape == (0, 3, 64)
    assert add_rms_norm(torch.empty(0, 64), torch.empty(0, 64), torch.ones(64), EPSILON).shape == (0, 64)


def test_rows_too_long_for_registers_are_refused() -> None:
    with pytest.raises(ValueError, match="16384 is the most"):
        rms_norm(torch.ones(1, 16385), torch.ones(16385), EPSILON)
