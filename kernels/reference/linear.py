"""The linear layer."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class ReferenceLinear:
    """Weights as they came: `weight [out, in]`, `bias [out]`."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """`x @ weight.T + bias + residual`."""
        out = F.linear(x, self.weight, self.bias)
        return out if residual is None else out + residual


def prepare_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> ReferenceLinear:
    """Nothing to arrange."""
    return ReferenceLinear(weight, bias)
