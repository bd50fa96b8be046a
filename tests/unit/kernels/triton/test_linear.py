"""The linear layer of the Triton backend, which is torch's."""

import torch

from kernels.triton.linear import prepare_linear


def test_linear_layers_keep_the_type_of_their_weights() -> None:
    weight, bias, x = torch.randn(5, 8).bfloat16(), torch.randn(5).bfloat16(), torch.randn(3, 8).bfloat16()
    out = prepare_linear(weight, bias)(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), x.float() @ weight.float().T + bias.float(), rtol=1e-2, atol=1e-2)
