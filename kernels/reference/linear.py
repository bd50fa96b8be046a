"""The linear layer."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class ReferenceLinear:
    """Weights as they came: `weight [out, in]`, `bias [out]`."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x @ weight.T + bias`."""
        return F.linear(x, self.weight, self.bias)


def prepare_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> ReferenceLinear:
    """Nothing to arrange."""
    return ReferenceLinear(weight, bias)
