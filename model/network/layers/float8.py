"""Linear layers that multiply in FP8 (e4m3), with a scale for each row of the input and of the weight.

The product is torch's own, `torch._scaled_mm`, which torchao calls as well. Torchao's tensors would replace the
weights, while explanations read these in bfloat16, attention takes some of their rows, and a compiled twin shares them:
here each of these is a line, and the quantisation itself is two.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MULTIPLE: Final = 16
"""What both sizes of a weight must be a multiple of for the product on CUDA."""

_LARGEST: Final = torch.finfo(torch.float8_e4m3fn).max


def quantised_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return [R, D] in float8 and the scale of each row, float32 [R, 1], whose product is close to x.

    The largest value of a row becomes float8's largest. A row that is not finite becomes NaN.
    """
    scale = x.abs().amax(dim=1, keepdim=True).float().clamp_min(1e-12) / _LARGEST
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


class Float8Linear(nn.Linear):
    """Computes what a linear layer does in FP8, where no gradient is needed; shares that layer's weight and bias.

    Args:
        layer: on its device, in bfloat16, which stays the dtype of input and output; both its sizes are multiples
            of 16.

    Attributes:
        exact: compute in the weight's own dtype instead.
    """

    quantised: Tensor
    scale: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)  # a linear layer's own would allocate another weight
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        quantised, scale = quantised_rows(layer.weight.detach())
        self.register_buffer("quantised", quantised, persistent=False)
        self.register_buffer("scale", scale.t(), persistent=False)  # [1, out]
        self.exact = False

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        return self.rows(x, slice(None))

    def rows(self, x: Tensor, rows: slice) -> Tensor:
        """Map [..., in] to these rows of the output, [..., rows]."""
        bias = None if self.bias is None else self.bias[rows]
        if self.exact or x.requires_grad:
            return F.linear(x, self.weight[rows], bias)
        quantised, scale = quantised_rows(x.reshape(-1, self.in_features))
        product: Tensor = torch._scaled_mm(
            quantised,
            self.quantised[rows].t(),
            scale_a=scale,
            scale_b=self.scale[:, rows],
            bias=bias,
            out_dtype=x.dtype,
            use_fast_accum=True,  # as for inference in torchao: sums of FP8 tensor cores, not promoted to float32
        )
        return product.reshape(*x.shape[:-1], -1)


def linear_rows(layer: nn.Linear, x: Tensor, rows: slice) -> Tensor:
    """Map [..., in] to these rows of a linear layer's output, [..., rows]."""
    if isinstance(layer, Float8Linear):
        return layer.rows(x, rows)
    return F.linear(x, layer.weight[rows], None if layer.bias is None else layer.bias[rows])
