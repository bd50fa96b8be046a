"""Linear layers, norm, rotation, activation and block copies of the CPU backend against the specification."""

import pytest
import torch

from kernels.cpu.rotary import rotary as cpu_rotary
from kernels.interface import Kernels
from kernels.kv_layout import KvLayout
from kernels.kv_pool import KvPool
from kernels.reference.rotary import rotary as reference_rotary
from kernels.select import select_kernels

cpu, reference = select_kernels("cpu"), select_kernels("reference")


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 33])
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 8), (5, 3), (960, 576), (97, 130)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_layers_add_the_bias(rows: int, out_features: int, in_features: int, has_bias: bool) -> None:
    x, weight = torch.randn(rows, in_features), torch.randn(out_features, in_features)
    bias = torch.randn(out_features) if has_bias else None
    ours, expected = (kernels.prepare_linear(weight, bias) for kernels in (cpu, reference))
    torch.testing.assert_close(ours(x), expected(x), rtol=1e-4, atol=1e-4)


def test_prepared_weights_do_not_follow_their_origin() -> None:
    weight = torch.randn(6, 4)
    layer, x = cpu.prepare_linear(weight, None), torch.randn(3, 4)
    before = layer(x)
    weight.zero_()
    assert torch.equal(layer(x), before)


@pytest.mark.parametrize("shape", [(1, 576), (33, 80), (5, 6, 96)])
def test_rms_norm_divides_by_the_root_mean_square(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape), torch.randn(shape[-1])
    torch.testing.assert_close(cpu.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    tiny = torch.full(shape, 1e-4)
    torch.testing.assert_close(cpu.rms_norm(tiny, weight, 1e-5), reference.rms_norm(tiny, weight, 1e-5))


def test_rms_norm_takes_a_weight_for_each_head_of_a_slice() -> None:
    x, weight = torch.randn(5, 9, 64)[:, :6], torch.randn(6, 64)
    torch.testing.assert_close(cpu.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("head_dim", [2, 64, 80])
def test_rotation_happens_in_place_and_leaves_other_heads_alone(head_dim: int) -> None:
    qkv = torch.randn(7, 5, head_dim)
    cos, sin = torch.randn(7, head_dim), torch.randn(7, head_dim)
    expected = qkv.clone()
    reference_rotary(expected[:, :4], cos, sin)
    ours = qkv.clone()
    cpu_rotary(ours[:, :4], cos, sin)
    torch.testing.assert_close(ours, expected)
    assert torch.equal(ours[:, 4], qkv[:, 4])


def test_silu_mul_gates_the_second_half() -> None:
    gate_up = torch.randn(7, 2 * 33)
    torch.testing.assert_close(cpu.silu_mul(gate_up), reference.silu_mul(gate_up))


@pytest.mark.parametrize("kernels", [cpu, reference])
def test_the_residual_is_added_in_place_before_the_norm(kernels: Kernels) -> None:
    x, residual, weight = torch.randn(3, 80), torch.randn(3, 80), torch.randn(80)
    total = x + residual
    torch.testing.assert_close(kernels.add_rms_norm(x, residual, weight, 1e-5), reference.rms_norm(total, weight, 1e-5))
    assert torch.equal(residual, total)


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_blocks_are_copied_whole(name: str, dtype: str) -> None:
    layout = KvLayout(2, 2, 8, 4, dtype)
    pool = KvPool.over(torch.randint(0, 256, (6 * layout.block_bytes + 3,), dtype=torch.uint8), layout, 6)
    expected = pool.raw[[0, 1, 2, 3, 1, 3]]
    select_kernels(name).copy_blocks(pool, torch.tensor([[1, 4], [3, 5]]))
    assert torch.equal(pool.raw, expected)


def test_unknown_kernels_are_an_error_that_names_the_choices() -> None:
    with pytest.raises(ValueError, match=r"'cuda'.*reference, cpu"):
        select_kernels("cuda")


def test_kernels_that_cannot_run_are_an_error_and_no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(ValueError, match="oneDNN"):
        select_kernels("cpu")
